//! Writes the whole catalogue for compilers other than ours: `write_kernels FOLDER`.
//!
//! - `NAME.naga.wgsl`: what native platforms compile.
//! - `NAME.tint.wgsl`: what browsers compile; matrix kernels have none.
//! - `NAME.spv`: naga's SPIR-V, written as wgpu has it written.
//! - `index.json`: a list with each kernel's interface and demands. Written last: where it is, the
//!   rest is complete.

#[path = "../tests/catalogue/mod.rs"]
mod catalogue;

use std::num::NonZero;
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};

use catalogue::{every_kernel, parsed, validated};
use kyklos_shaders::{Access, AttendVariant, Dialect, ENTRY_POINT, Kernel};
use naga::back::spv;
use naga::proc::{BoundsCheckPolicies, BoundsCheckPolicy};

fn main() -> ExitCode {
    let Some(folder) = std::env::args_os().nth(1) else {
        eprintln!("write_kernels: say the folder to write to");
        return ExitCode::FAILURE;
    };
    match write(Path::new(&folder)) {
        Ok(count) => {
            println!("{count} kernels written");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("write_kernels: {error}");
            ExitCode::FAILURE
        }
    }
}

fn write(folder: &Path) -> std::io::Result<usize> {
    std::fs::create_dir_all(folder)?;
    let kernels = every_kernel();
    let next = AtomicUsize::new(0);
    let worker = || {
        while let Some(kernel) = kernels.get(next.fetch_add(1, Ordering::Relaxed)) {
            write_kernel(folder, kernel)?;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let threads = std::thread::available_parallelism().map_or(1, NonZero::get);
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(worker)).collect();
        workers.into_iter().try_for_each(|worker| {
            worker
                .join()
                .unwrap_or_else(|_| Err(std::io::Error::other("a kernel does not translate: see above")))
        })
    })?;
    let entries: Vec<String> = kernels.iter().map(entry).collect();
    std::fs::write(folder.join("index.json"), format!("[\n{}\n]\n", entries.join(",\n")))?;
    Ok(kernels.len())
}

fn write_kernel(folder: &Path, kernel: &Kernel) -> std::io::Result<()> {
    let name = kernel.name();
    std::fs::write(folder.join(format!("{name}.naga.wgsl")), kernel.source(Dialect::Naga))?;
    if in_browsers(kernel) {
        std::fs::write(folder.join(format!("{name}.tint.wgsl")), kernel.source(Dialect::Tint))?;
    }
    let bytes: Vec<u8> = spirv(kernel).into_iter().flat_map(u32::to_le_bytes).collect();
    std::fs::write(folder.join(format!("{name}.spv")), bytes)
}

/// No browser has matrix units, and Tint spells its own experiment with them otherwise. The
/// portable kernel with shuffles is for native devices: the number of a subgroup is new in
/// browsers.
const fn in_browsers(kernel: &Kernel) -> bool {
    !kernel.needs_matrices() && !shuffles(kernel)
}

const fn shuffles(kernel: &Kernel) -> bool {
    let Kernel::Attend(kernel) = kernel else { return false };
    matches!(kernel.variant, AttendVariant::Portable { shuffles: true, .. })
}

/// SPIR-V version and the Vulkan that the kernel may meet first: each kernel is held against the
/// strictest rules that it has to obey. Vulkan 1.1 is the first with subgroups. The extension for
/// matrices is written against SPIR-V 1.6, and no driver below Vulkan 1.3 has it.
const fn target(kernel: &Kernel) -> ((u8, u8), &'static str) {
    if kernel.needs_matrices() { ((1, 6), "vulkan1.3") } else { ((1, 3), "vulkan1.1") }
}

fn spirv(kernel: &Kernel) -> Vec<u32> {
    let module = parsed(kernel);
    let info = validated(kernel, &module);
    // As wgpu does where the driver is no help: every check and the zeroing of workgroup memory are in
    // the code.
    let options = spv::Options {
        lang_version: target(kernel).0,
        flags: spv::WriterFlags::LABEL_VARYINGS,
        bounds_check_policies: BoundsCheckPolicies {
            index: BoundsCheckPolicy::Restrict,
            buffer: BoundsCheckPolicy::Restrict,
            image_load: BoundsCheckPolicy::Restrict,
            binding_array: BoundsCheckPolicy::Unchecked,
        },
        zero_initialize_workgroup_memory: spv::ZeroInitializeWorkgroupMemoryMode::Polyfill,
        force_loop_bounding: true,
        emit_int_div_checks: true,
        ..Default::default()
    };
    let pipeline = spv::PipelineOptions {
        shader_stage: naga::ShaderStage::Compute,
        entry_point: ENTRY_POINT.to_owned(),
    };
    spv::write_vec(&module, &info, &options, Some(&pipeline))
        .unwrap_or_else(|error| panic!("{} to SPIR-V: {error}", kernel.name()))
}

/// The kernel's line of the index. Names and types hold nothing that JSON would want escaped.
fn entry(kernel: &Kernel) -> String {
    let bindings: Vec<String> = kernel
        .bindings()
        .iter()
        .map(|binding| {
            let access = match binding.access {
                Access::Uniform => "uniform",
                Access::Read => "read",
                Access::ReadWrite => "read-write",
                Access::Texture => "texture",
            };
            format!(r#"{{"name":"{}","access":"{access}","element":"{}"}}"#, binding.name, binding.element)
        })
        .collect();
    let mut features = Vec::new();
    if kernel.needs_subgroups() {
        features.push(r#""subgroups""#);
    }
    if kernel.needs_matrices() {
        features.push(r#""matrices""#);
    }
    format!(
        concat!(
            r#"{{"name":"{}","entry_point":"{}","in_browsers":{},"vulkan":"{}","features":[{}],"#,
            r#""workgroup_size":{},"workgroup_bytes":{},"uniform_bytes":{},"bindings":[{}]}}"#
        ),
        kernel.name(),
        ENTRY_POINT,
        in_browsers(kernel),
        target(kernel).1,
        features.join(","),
        kernel.workgroup_size(),
        kernel.workgroup_bytes(),
        kernel.uniform().bytes,
        bindings.join(",")
    )
}
