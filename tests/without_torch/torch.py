"""Stands in the way of PyTorch in processes that tests start: TVM FFI imports it if it is there, which takes 2 s of CPU."""

raise ModuleNotFoundError("tests leave torch out of processes that do not need it", name="torch")
