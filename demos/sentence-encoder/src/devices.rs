//! The device on which a rank attends. The rest of the model runs on the cores of the process.

use std::str::FromStr;

use kyklos::backend::Device;

use crate::{Error, Result};

/// A device, as `--devices` names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceName {
    /// The best one of this machine.
    Best,
    /// The cores.
    Cpu,
    /// The GPU of this number; it may be a software one.
    Wgpu(usize),
}

impl FromStr for DeviceName {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let unknown = || Error::request(format!("device {text}: use best, cpu, wgpu or wgpu:N"));
        match text {
            "best" => Ok(Self::Best),
            "cpu" => Ok(Self::Cpu),
            "wgpu" => Ok(Self::Wgpu(0)),
            _ => {
                let index = text.strip_prefix("wgpu:").ok_or_else(unknown)?;
                index.parse().map(Self::Wgpu).map_err(|_| unknown())
            }
        }
    }
}

impl DeviceName {
    /// Opens the device.
    ///
    /// # Errors
    /// [`Error::Attention`] where the machine does not have it.
    pub fn open(self) -> Result<Device> {
        Ok(match self {
            Self::Best => Device::best()?,
            Self::Cpu => Device::cpu(),
            Self::Wgpu(index) => Device::wgpu(index)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_message() {
        let parse = |text: &str| text.parse::<DeviceName>();
        assert_eq!(parse("best").unwrap(), DeviceName::Best);
        assert_eq!(parse("cpu").unwrap(), DeviceName::Cpu);
        assert_eq!(parse("wgpu").unwrap(), DeviceName::Wgpu(0));
        assert_eq!(parse("wgpu:3").unwrap(), DeviceName::Wgpu(3));
        for wrong in ["", "gpu", "wgpu:", "wgpu:x", "cuda"] {
            assert!(parse(wrong).unwrap_err().to_string().contains("use best, cpu"), "{wrong}");
        }
    }
}
