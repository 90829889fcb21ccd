"""A trace as one HTML page: no server, no network, no script that it does not need to be read.

`document.py` puts it together of sections: the verdict, where a step's time goes, the timeline, memory,
explanations. `costs_shown.py` has modules, lines, kernels and exchanges. `markup.py` has
tables and numbers, `charts.py` axes. page.css and page.js
stand in the page as they are: filters, sorting, the timeline, keys.
"""
