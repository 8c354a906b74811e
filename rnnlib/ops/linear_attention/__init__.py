from rnnlib.ops.linear_attention.api import linear_attention as linear_attention
