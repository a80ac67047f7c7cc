"""The nodes."""

from __future__ import annotations

from typing import Any

from . import qr, sharing
from .override import make_override, previous_of


class KyklosHelpers:
    """Lets helpers compute a share of the heads of a model's attention."""

    CATEGORY = "kyklos"
    DESCRIPTION = (
        "Other devices (another PC, an iGPU, a browser tab) compute a share of the attention of this model. They need no model. "
        "Put this node last before the sampler, and invite devices with 'Kyklos invite helper'. "
        "If no helper is there, or none is fast enough, this machine computes everything as without the node."
    )
    FUNCTION = "apply"
    RETURN_TYPES = ("MODEL",)
    OUTPUT_TOOLTIPS = ("The model whose attention is shared.",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        enabled = {"default": True, "tooltip": "Off: the model passes through unchanged."}
        smallest = {"default": 1024, "min": 1, "max": 1 << 20, "tooltip": "Attention over fewer tokens than this is computed here."}
        wire = {"default": "same", "tooltip": "same: tensors travel as they are. f16, int8: fewer bytes for a slow network, and rounded."}
        names = {"default": "", "tooltip": "Names of helpers, separated by commas. Empty: all that you have invited."}
        devices = {"default": "", "tooltip": "Other devices of this machine that help, separated by commas: wgpu:1, cuda:1, cpu."}
        others = {
            "default": False,
            "tooltip": "Another node before this one replaces attention. On: it only chooses a kernel (Sage, Flash), so share its calls. "
            "Off: it may change what attention computes, so leave its calls to it.",
        }
        return {
            "required": {
                "model": ("MODEL",),
                "enabled": ("BOOLEAN", enabled),
                "smallest_tokens": ("INT", smallest),
                "wire": (["same", "f16", "int8"], wire),
            },
            "optional": {
                "names": ("STRING", names),
                "devices": ("STRING", devices),
                "over_other_attention": ("BOOLEAN", others),
            },
        }

    def apply(
        self,
        model: Any,
        enabled: bool,
        smallest_tokens: int,
        wire: str,
        names: str = "",
        devices: str = "",
        over_other_attention: bool = False,
    ) -> tuple[Any]:
        """Raises as :func:`sharing.open_helpers`: before a picture is begun."""
        if not enabled:
            return (model,)
        opened = sharing.open_helpers(names, devices, wire)
        shared = model.clone()
        # The options of a clone may still be those of the model it was cloned from.
        options = dict(shared.model_options.get("transformer_options", {}))
        # A second node of this kind replaces the first one.
        previous = previous_of(options.get("optimized_attention_override"))
        options["optimized_attention_override"] = make_override(
            opened, smallest_tokens=smallest_tokens, wire=wire, previous=previous, over_others=over_other_attention
        )
        shared.model_options = {**shared.model_options, "transformer_options": options}
        return (shared,)


class KyklosInvite:
    """Invites a device: its token, as text and as a QR code, and the command to type there."""

    CATEGORY = "kyklos"
    DESCRIPTION = (
        "Makes an invitation. Type the command on the other device, or scan the code there. "
        "Who has the token can help in your name: keep it to yourself."
    )
    FUNCTION = "invite"
    OUTPUT_NODE = True
    RETURN_TYPES = ("STRING", "STRING", "IMAGE")
    RETURN_NAMES = ("token", "command", "qr_code")

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        name = {"default": "laptop", "tooltip": "What you call the device: letters, digits, - and _."}
        address = {"default": "", "tooltip": "This machine's address, as the other device reaches it. Empty: found by itself."}
        port = {"default": 0, "min": 0, "max": 65535, "tooltip": "The port that the other device connects to. 0: chosen by itself."}
        return {
            "required": {"name": ("STRING", name)},
            "optional": {"address": ("STRING", address), "port": ("INT", port)},
        }

    def invite(self, name: str, address: str = "", port: int = 0) -> dict[str, Any]:
        """Raises as :func:`sharing.open_helpers`, and for a name that is none. A name that is known gives its invitation again."""
        helpers = sharing.open_helpers().helpers
        invitation = helpers.invite(name.strip(), address=address.strip() or None, port=port or None)
        shown: dict[str, Any] = {"kyklos_command": [invitation.command]}
        if (folder := _temporary_folder()) is not None:
            shown["images"] = [{"filename": qr.save_preview(invitation.token, folder), "subfolder": "", "type": "temp"}]
        return {"ui": shown, "result": (invitation.token, invitation.command, qr.image(invitation.token))}


def _temporary_folder() -> str | None:
    """Where ComfyUI keeps previews until it is started again; None without ComfyUI."""
    try:
        import folder_paths
    except ImportError:
        return None
    return str(folder_paths.get_temp_directory())
