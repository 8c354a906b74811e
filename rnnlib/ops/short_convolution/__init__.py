from rnnlib.ops.short_convolution.api import short_convolution as short_convolution
