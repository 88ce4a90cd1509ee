"""From a measurement to its page."""

from jax_ep.tools.diagnosis import Diagnosis
from jax_ep.tools.measurement import Measurement
from jax_ep.tools.page import (
    bandwidth,
    conditions,
    load,
    overlap,
    padding,
    summary,
)
from jax_ep.tools.page.document import Page


def page(measurement: Measurement, diagnosis: Diagnosis) -> Page:
    """The whole page of one run."""
    return Page(
        title="jax_ep: where the time of an exchange goes",
        verdict=diagnosis.sentence,
        setting=conditions.setting(measurement),
        sections=[
            summary.section(diagnosis),
            bandwidth.section(measurement),
            padding.section(measurement, diagnosis),
            load.section(measurement, diagnosis),
            overlap.section(measurement),
            conditions.section(measurement),
            conditions.gaps(measurement),
        ],
    )
