"""`mlcpipe chat`: talk to a model."""
