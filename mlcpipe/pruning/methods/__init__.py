"""Methods of pruning, one file each, named as `--method` names them.

A file has `GRAM`, whether it needs the mean of x^T x of every matrix's inputs; `UNITS`, what `--keep` counts, or ""
where a pattern fixes what stays; with units `allowed(model)`, how many may stay, all of them last; and `pruned(work)`,
which yields the tensors of the pruned checkpoint and writes into `work.config` what its config.json says.
"""
