//! The kernels that Kyklos chooses on the open device, compiled.

use ash::vk;
use kyklos::Dtype;
use kyklos::backend::wgpu::WgpuBackend;
use kyklos_shaders::{Access, Dialect, Kernel};

use crate::compiled::numbers;
use crate::device::Device;
use crate::spirv;

/// Head dims and types for which the table has kernels.
const TENSORS: [(Dtype, usize); 6] = [
    (Dtype::F16, 64),
    (Dtype::F16, 128),
    (Dtype::F16, 256),
    (Dtype::F32, 64),
    (Dtype::F32, 128),
    (Dtype::F32, 256),
];

/// Prints a line of the table for each kernel. With a kernel and a folder, for that kernel only,
/// and the texts of the compiler go into the folder.
pub(crate) fn measure(name: &str, rest: &[&str]) -> Result<(), String> {
    let wanted = match rest {
        [] => None,
        [kernel, folder] => Some((*kernel, std::path::Path::new(folder))),
        _ => return Err("say device NAME [KERNEL FOLDER]".to_owned()),
    };
    let chosen = chosen()?;
    let device = Device::open()?;
    eprintln!("{name}: {}, {}", device.name, device.driver);
    let mut printed = 0;
    for kernel in chosen.iter().filter(|kernel| wanted.is_none_or(|(name, _)| kernel.name() == name)) {
        let name = kernel.name();
        let words =
            spirv::words(&kernel.source(Dialect::Naga)).map_err(|error| format!("{name}: {error}"))?;
        let bindings: Vec<_> = kernel.bindings().iter().map(|binding| descriptor(binding.access)).collect();
        let compiled = device
            .compile(&words, &bindings, kernel.needs_subgroups())
            .map_err(|error| format!("{name}: {error}"))?;
        println!("{name} = {}", numbers(&compiled).map_err(|error| format!("{name}: {error}"))?);
        printed += 1;
        if let Some((_, folder)) = wanted {
            std::fs::create_dir_all(folder).map_err(|error| error.to_string())?;
            for (title, text) in &compiled.texts {
                let file = folder.join(format!("{name}.{}.txt", title.replace([' ', '/'], "-")));
                std::fs::write(&file, text).map_err(|error| format!("{}: {error}", file.display()))?;
            }
        }
    }
    if printed == 0 {
        let names: Vec<_> = chosen.iter().map(Kernel::name).collect();
        return Err(format!("no such kernel on {name}: there are {}", names.join(", ")));
    }
    Ok(())
}

/// What the backend uses on the first device of this machine.
fn chosen() -> Result<Vec<Kernel>, String> {
    let mut all = Vec::new();
    for (dtype, head_dim) in TENSORS {
        for kernel in WgpuBackend::built_in_kernels(0, dtype, head_dim).map_err(|error| error.to_string())? {
            // Decoding of f16 alone, and of heads of 256 attention alone: the table stays readable.
            let listed = match kernel {
                Kernel::Attend(_) => true,
                Kernel::Decode(_) => dtype == Dtype::F16 && head_dim <= 128,
                _ => head_dim <= 128,
            };
            if listed && !all.contains(&kernel) {
                all.push(kernel);
            }
        }
    }
    Ok(all)
}

const fn descriptor(access: Access) -> vk::DescriptorType {
    match access {
        Access::Uniform => vk::DescriptorType::UNIFORM_BUFFER,
        Access::Read | Access::ReadWrite => vk::DescriptorType::STORAGE_BUFFER,
        Access::Texture => vk::DescriptorType::STORAGE_IMAGE,
    }
}
