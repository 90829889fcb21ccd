"""A trace as one HTML page: no server, no network, no script that it does not need to be read.

`document.py` puts it together of sections: `overview.py` (the verdict, where a step's time goes),
`timeline.py`, `costs_shown.py` (modules, lines, kernels), `memory.py`, `told.py` (explanations and
hindrances), `exchanges_shown.py`. `markup.py` has tables and numbers, `charts.py` axes. page.css and
page.js stand in the page as they are: filters, sorting, the timeline, keys.
"""
