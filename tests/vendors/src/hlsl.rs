//! HLSL of the kernels, as wgpu gives it to Microsoft's compiler.

use std::path::Path;

use naga::back::hlsl;

use crate::catalogue::{every_kernel, parsed, validated};

/// Writes `NAME.hlsl` for each kernel of the catalogue but those for matrix units.
///
/// # Errors
/// naga's message, for a kernel that it refuses; a file that cannot be written.
pub(crate) fn write(folder: &Path) -> Result<(), String> {
    std::fs::create_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let options = hlsl::Options {
        shader_model: hlsl::ShaderModel::V6_0,
        fake_missing_bindings: true,
        // From wgpu-hal 30, dx12/device.rs. Kernels switch off the zeroing of workgroup memory.
        restrict_indexing: true,
        force_loop_bounding: true,
        zero_initialize_workgroup_memory: false,
        ..Default::default()
    };
    for kernel in every_kernel().into_iter().filter(|kernel| !kernel.needs_matrices()) {
        let module = parsed(&kernel);
        let info = validated(&kernel, &module);
        let mut text = String::new();
        hlsl::Writer::new(&mut text, &options, &hlsl::PipelineOptions::default())
            .write(&module, &info, None)
            .map_err(|error| format!("{}: {error}", kernel.name()))?;
        let file = folder.join(format!("{}.hlsl", kernel.name()));
        std::fs::write(&file, text).map_err(|error| format!("{}: {error}", file.display()))?;
    }
    Ok(())
}
