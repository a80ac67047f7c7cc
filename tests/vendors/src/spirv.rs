//! SPIR-V of a kernel, as wgpu writes it for a driver of Vulkan 1.3 with `robustBufferAccess2`.

use kyklos_shaders::ENTRY_POINT;
use naga::back::spv;
use naga::proc::{BoundsCheckPolicies, BoundsCheckPolicy};
use naga::valid::{Capabilities, ShaderStages, SubgroupOperationSet, ValidationFlags, Validator};

/// The words of the SPIR-V module for WGSL `source`.
///
/// # Errors
/// naga's message, for a text that it refuses.
pub(crate) fn words(source: &str) -> Result<Vec<u32>, String> {
    let module = naga::front::wgsl::parse_str(source).map_err(|error| error.emit_to_string(source))?;
    let info = Validator::new(ValidationFlags::all(), Capabilities::all())
        .subgroup_stages(ShaderStages::COMPUTE)
        .subgroup_operations(SubgroupOperationSet::all())
        .validate(&module)
        .map_err(|error| error.emit_to_string(source))?;
    // From wgpu-hal 30, vulkan/adapter.rs, for such a driver. Kernels switch off the zeroing of
    // workgroup memory.
    let options = spv::Options {
        lang_version: (1, 6),
        flags: spv::WriterFlags::LABEL_VARYINGS | spv::WriterFlags::FORCE_POINT_SIZE,
        bounds_check_policies: BoundsCheckPolicies {
            index: BoundsCheckPolicy::Restrict,
            buffer: BoundsCheckPolicy::Unchecked,
            image_load: BoundsCheckPolicy::Unchecked,
            binding_array: BoundsCheckPolicy::Unchecked,
        },
        zero_initialize_workgroup_memory: spv::ZeroInitializeWorkgroupMemoryMode::None,
        force_loop_bounding: true,
        emit_int_div_checks: true,
        ..Default::default()
    };
    let pipeline = spv::PipelineOptions {
        shader_stage: naga::ShaderStage::Compute,
        entry_point: ENTRY_POINT.to_owned(),
    };
    spv::write_vec(&module, &info, &options, Some(&pipeline)).map_err(|error| error.to_string())
}
