"""From a measurement to its page."""

from jax_ep.tools.diagnosis import Diagnosis
from jax_ep.tools.measurement import Measurement
from jax_ep.tools.page import (
    bandwidth,
    conditions,
    load,
    overlap,
    padding,
    profiled,
    summary,
)
from jax_ep.tools.page.document import Page
from jax_ep.tools.profile import Profile


def page(
    measurement: Measurement, diagnosis: Diagnosis, profile: Profile | None = None
) -> Page:
    """The whole page of one run, with what a profile shows if there is one."""
    return Page(
        title="jax_ep: where the time of an exchange goes",
        verdict=diagnosis.sentence,
        setting=conditions.setting(measurement),
        sections=[
            summary.section(diagnosis, measurement),
            bandwidth.section(measurement),
            padding.section(measurement, diagnosis),
            load.section(measurement, diagnosis),
            overlap.section(measurement),
            *([] if profile is None else [profiled.section(profile)]),
            conditions.section(measurement),
            conditions.gaps(measurement),
        ],
    )
