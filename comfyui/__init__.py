"""Kyklos helpers for ComfyUI: other devices compute a share of the heads of a model's attention.

ComfyUI imports this folder from its ``custom_nodes`` and reads the three names below.
"""

from .nodes import KyklosHelpers, KyklosInvite
from .routes import add_routes

NODE_CLASS_MAPPINGS = {"KyklosHelpers": KyklosHelpers, "KyklosInvite": KyklosInvite}
NODE_DISPLAY_NAME_MAPPINGS = {"KyklosHelpers": "Kyklos helpers", "KyklosInvite": "Kyklos invite helper"}
WEB_DIRECTORY = "./web"
__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS", "WEB_DIRECTORY"]

add_routes()
