"""Methods of pruning, one file each, named as `--method` names them.

A file has `GRAM`, whether its statistics need the mean of x^T x of every matrix's inputs; `UNITS`, what `--keep` counts,
or "" where a pattern fixes what stays; `allowed(model)`, how many units may stay, most last; and `pruned(work)`, which
yields the tensors of the pruned checkpoint and writes into `work.config` what config.json says of it.
"""
