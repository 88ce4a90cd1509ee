"""What `doctor` looks at: a file for each subject, facts apart from what they mean."""
