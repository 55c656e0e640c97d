"""AproMFL (arXiv 2502.04400): devices of different modalities and label sets learn by adaptive prototypes.

prototypes: ``adaptive``, class means where there are labels, else clusters, paired on the server.
objective: ``margin`` or the labels as its own task, ``cluster_contrast`` (equations 3-4), ``prototype_transfer``
(7-8), ``model_transfer`` (9), ``regulariser`` (6).
weight: ``relationship``, each device's own mean of the mappings.
"""
