use crate::{compiled::numbers, device::Device, spirv};
use ash::vk;
use kyklos_shaders::*;
pub(crate) fn run(args: &[&str]) -> Result<(), String> {
    let device = Device::open()?;
    for arg in args {
        let p: Vec<&str> = arg.split(':').collect();
        let storage = match p[2] { "f32" => Storage::F32, "f16" => Storage::F16, _ => Storage::Bf16 };
        let head_dim: u32 = p[3].parse().unwrap();
        let (bias, softcap) = (BiasInput::None, false);
        let variant = BackwardVariant::Portable(match std::env::var("VENDOR").as_deref() { Ok("amd") => Vendor::Amd, Ok("nvidia") => Vendor::Nvidia, Ok("intel") => Vendor::Intel, _ => Vendor::Other });
        let kernel = match p[0] {
            "a" => Kernel::Attend(AttendKernel { variant: p[1].parse().unwrap(), storage, head_dim, softcap, bias }),
            "d" => Kernel::Decode(DecodeKernel { variant: DecodeVariant::Portable, storage, head_dim, slots: p[1].parse().unwrap(), softcap, bias }),
            "bq" => Kernel::AttendBackward(BackwardKernel { variant, sums: Sums::Queries, storage, head_dim, softcap, bias }),
            "bk" => Kernel::AttendBackward(BackwardKernel { variant, sums: match p[1] { "kv" => Sums::KeysValues, "k" => Sums::Keys, _ => Sums::Values }, storage, head_dim, softcap, bias }),
            _ => panic!(),
        };
        let source = p.get(4).map_or_else(|| kernel.source(Dialect::Naga).to_string(), |f| std::fs::read_to_string(f).unwrap());
        let words = spirv::words(&source)?;
        let types: Vec<_> = kernel.bindings().iter().map(|b| match b.access { Access::Uniform => vk::DescriptorType::UNIFORM_BUFFER, Access::Texture => vk::DescriptorType::STORAGE_IMAGE, _ => vk::DescriptorType::STORAGE_BUFFER }).collect();
        let c = device.compile(&words, &types, kernel.needs_subgroups())?;
        println!("{} {}", kernel.name(), numbers(&c)?);
        if let Ok(f) = std::env::var("ISA") { std::fs::create_dir_all(&f).unwrap(); for (k, v) in &c.texts { std::fs::write(format!("{f}/{}.{}", kernel.name(), k.replace([' ', '/'], "_")), v).unwrap(); } }
    }
    Ok(())
}
