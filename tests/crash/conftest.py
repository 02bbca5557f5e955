from tests.gateways import gateway, gateway_process

__all__ = ["gateway", "gateway_process"]
