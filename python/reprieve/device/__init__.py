"""The devices that compute steps."""
