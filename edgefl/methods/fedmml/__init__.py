"""LW-FedMML and Prog-FedMML (Wang et al., arXiv 2407.15426): training and exchange of one encoder stage at a time.

Stage s:  theta_s <- FedAvg of theta_s, with theta_1..s-1 frozen (layer-wise) or trained on (progressive).
schedule: which parts exist and are trained in a stage, and the whole-model schedules beside them.
objective: ``clip``, the contrast of paired modalities.
"""
