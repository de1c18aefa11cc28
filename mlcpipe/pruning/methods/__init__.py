"""Pruning methods, one file each, named as in `--method`.

A file has `GRAM`, whether it needs the mean of x^T x of every matrix's inputs; `UNITS`, the unit of `--keep`, or "" for
a fixed pattern; with units `allowed(model)`, the possible numbers of remaining units, ending with all; and
`pruned(work)`, which yields the tensors of the pruned checkpoint and edits its config.json in `work.config`.
"""
