"""From graph to graph, in the order of `pipeline`: simplify, match, lay out, split, fuse, plan memory."""
