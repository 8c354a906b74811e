from rnnlib.ops.gated_delta_rule.api import gated_delta_rule as gated_delta_rule
