"""Max-min fair rates of flows that share links.

No flow's rate can be raised without lowering that of one that is no faster: Bertsekas and Gallager, Data Networks
(1992), section 6.5.2. Found by progressive filling: a link that is the narrowest place of all its flows gives each the
same rate, which is then settled; all such links at once, then those that are the narrowest of what is left.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

ROUNDING = 1e-9  # links whose shares differ by no more are equally narrow


def fair_rates(links: Ints, weights: Floats, count: int) -> Floats:
    """The rate of each flow, in its own unit per second.

    ``links`` (flows x links of a flow) are indices below ``count``; flow ``f`` at rate 1 takes ``weights[f, i]``, above
    0, of the time of ``links[f, i]``, and each link has one second per second to give. The link ``count - 1`` stands
    for no link: it is never narrow, and a flow that names no other has the rate infinity.
    """
    rates = np.full(len(links), np.inf)
    left, flows = np.ones(count), np.arange(len(links))
    while len(flows):
        used = np.bincount(links.ravel(), weights.ravel(), count)
        shares = np.full(count, np.inf)
        np.divide(left, used, out=shares, where=used > 0)
        shares[-1] = np.inf
        offered = shares[links]
        narrowest = offered.min(1)
        is_wider = offered > narrowest[:, None] * (1 + ROUNDING)
        wider = np.bincount(links.ravel(), is_wider.ravel(), count)
        settled = ((wider[links] == 0) & ~is_wider).any(1) | np.isinf(narrowest)
        rates[flows[settled]] = narrowest[settled]
        taken = np.where(np.isinf(narrowest[settled]), 0.0, narrowest[settled])[:, None] * weights[settled]
        left = np.maximum(left - np.bincount(links[settled].ravel(), taken.ravel(), count), 0.0)
        flows, links, weights = flows[~settled], links[~settled], weights[~settled]
    return rates
