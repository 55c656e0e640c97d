"""MMiC (arXiv 2505.06911): repair of updates that missing modalities spoilt, within clusters of devices.

cluster: ``lsh`` and ``lsh_joining`` (section 4.1).
repair: ``poverty``, its layer (equations 8-10, 13), what replaces it (11), and one-layer exchange.
select: ``banzhaf`` (17-18).  optimise: ``fedadagrad_mpo`` (19-22).
missing: ``zero_input`` and ``reconstruction``, its variants.
"""
