"""The example shop: where a customer's own app, with tools of its own, would sit."""
