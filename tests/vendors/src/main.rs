//! What vendors' shader compilers make of the kernels that Kyklos chooses on their GPUs, without
//! hardware.
//!
//! Mesa has no-op stand-ins for kernel drivers of GPUs (`mesa-drm-shim`), over which its Vulkan
//! drivers compile and run nothing. This program opens such a device, asks Kyklos which kernels it
//! would use there, compiles them as wgpu does, and holds what the driver says about the results
//! against `ceilings.toml`.
//!
//! - `kyklos-vendors check MESA [DEVICE...]`: MESA is the folder that `tests/peers/newest_mesa.sh`
//!   fills; without names all devices. `--smoke` takes one device of each compiler that compiles
//!   fast.
//! - `kyklos-vendors bless MESA [DEVICE...]`: measures, and writes the ceilings of these devices
//!   anew.
//! - `kyklos-vendors show MESA DEVICE KERNEL FOLDER`: writes the texts of the compiler for a kernel
//!   of the device into FOLDER: its intermediate code and its machine code.
//! - `kyklos-vendors over MESA DEVICE PROGRAM [ARGUMENT...]`: runs another program over a stand-in.
//!   It can find and open the device; the driver gives up when it is to compute.
//! - `kyklos-vendors hlsl FOLDER`: writes every kernel as DX12 gets it, but those for matrix units,
//!   which naga does not write as HLSL.
//! - `kyklos-vendors device NAME [KERNEL FOLDER]`: the part that runs over a stand-in.

#[path = "../../../shaders/tests/catalogue/mod.rs"]
mod catalogue;
mod compiled;
mod device;
mod devices;
mod hlsl;
mod isa;
mod kernels;
mod spirv;
mod table;

use std::path::Path;
use std::process::ExitCode;

use devices::{DEVICES, Stand};
use table::Table;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let done = match words[..] {
        ["check", mesa, "--smoke"] => check(Path::new(mesa), DEVICES.iter().filter(|device| device.smoke)),
        ["check", mesa, ref names @ ..] => {
            devices::named(names).and_then(|devices| check(Path::new(mesa), devices.into_iter()))
        }
        ["bless", mesa, ref names @ ..] => {
            devices::named(names).and_then(|devices| bless(Path::new(mesa), &devices))
        }
        ["show", mesa, name, kernel, folder] => devices::named(&[name]).and_then(|devices| {
            print!("{}", devices[0].run_self(Path::new(mesa), &["device", name, kernel, folder])?);
            Ok(())
        }),
        ["over", mesa, name, program, ref rest @ ..] => devices::named(&[name]).and_then(|devices| {
            let (text, errors) = devices[0].run(Path::new(mesa), Path::new(program), rest)?;
            print!("{text}");
            eprint!("{errors}");
            Ok(())
        }),
        ["hlsl", folder] => hlsl::write(Path::new(folder)),
        ["device", name, ref rest @ ..] => kernels::measure(name, rest),
        _ => Err(
            "say check MESA [--smoke | DEVICE...], bless MESA [DEVICE...], show MESA DEVICE KERNEL FOLDER, \
             over MESA DEVICE PROGRAM [ARGUMENT...] or hlsl FOLDER"
                .to_owned(),
        ),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("kyklos-vendors: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Measures `devices` and compares.
fn check<'a>(mesa: &Path, devices: impl Iterator<Item = &'a Stand>) -> Result<(), String> {
    let ceilings = Table::read()?;
    let mut faults = Vec::new();
    for device in devices {
        if let Some(missing) = device.missing(mesa) {
            println!("not run: {}: {missing}", device.name);
            continue;
        }
        let start = std::time::Instant::now();
        let measured = device.measure(mesa)?;
        let of_device = ceilings.faults(device.name, &measured);
        println!(
            "{:9} {} kernels, {} faults, {:.0} s",
            device.name,
            measured.len(),
            of_device.len(),
            start.elapsed().as_secs_f64()
        );
        faults.extend(of_device);
    }
    if faults.is_empty() { Ok(()) } else { Err(format!("\n{}", faults.join("\n"))) }
}

fn bless(mesa: &Path, devices: &[&Stand]) -> Result<(), String> {
    let mut table = Table::read()?;
    for device in devices {
        match device.missing(mesa) {
            Some(missing) => println!("left as it is: {}: {missing}", device.name),
            None => table.set(device.name, device.measure(mesa)?),
        }
    }
    table.write()
}
