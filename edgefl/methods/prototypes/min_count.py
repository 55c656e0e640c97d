"""The least count of a prototype that leaves a device: an option of every kind of prototypes."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

#: A mean of one sample is that sample.
MinCount = Annotated[
    int,
    Meta(
        ge=1,
        description="fewest samples of a class on a device whose mean it sends; fewer would give them away",
    ),
]
