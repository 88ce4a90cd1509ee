"""What is measured, and how: ids, programs, device time, and the machine's ceilings."""
