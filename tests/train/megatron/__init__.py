import compassrl.train.megatron.cpu  # noqa: F401  before Megatron-Core, which it makes lighter
