from rnnlib.ops.dplr.api import dplr as dplr
