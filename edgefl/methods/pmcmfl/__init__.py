"""PmcmFL (Bao et al., arXiv 2312.13508): class prototypes for whatever modality a device lacks.

prototypes: ``class_mean``, P_m,c (equations 1-3).
missing: ``prototype`` stands in for an absent projection (equations 4-6).
objective: ``prototype_contrast`` and ``modality_contrast`` (equation 7), ``prototype_alignment`` of its ablation.
``matcher_networks``: the networks that guess an absent modality's class, trained in the closing round.
"""
