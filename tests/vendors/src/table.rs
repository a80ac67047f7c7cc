//! `ceilings.toml`: what compilers made of the kernels when the table was written.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use serde::Deserialize;

/// What a compiler made of one kernel. Fewer is better, except for the occupancy.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Numbers {
    /// Registers that were moved to memory.
    pub(crate) spills: u64,
    /// Bytes of that memory, in the driver's measure.
    pub(crate) scratch: u64,
    /// Registers of a thread, in the driver's measure.
    pub(crate) registers: u64,
    /// Subgroups or threads that run at once, in the driver's measure; on Intel the lanes of a
    /// subgroup.
    pub(crate) occupancy: u64,
    /// Bytes of machine code.
    pub(crate) code: u64,
    /// Vector instructions for each multiply-add, in the worst inner loop. AMD only.
    pub(crate) per_multiply_add: Option<f64>,
    /// Bytes that a lane reads from workgroup memory for each multiply-add, in the worst inner
    /// loop. AMD only.
    pub(crate) shared_bytes: Option<f64>,
    /// Instructions for matrix units. Here fewer is worse.
    pub(crate) matrix: Option<u64>,
    /// Beside these, reads of two bytes from workgroup memory.
    pub(crate) narrow: Option<u64>,
}

impl fmt::Display for Numbers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { spills, scratch, registers, occupancy, code, .. } = self;
        write!(
            f,
            "{{ spills = {spills}, scratch = {scratch}, registers = {registers}, occupancy = {occupancy}, code = {code}"
        )?;
        for (name, value) in
            [("per_multiply_add", self.per_multiply_add), ("shared_bytes", self.shared_bytes)]
        {
            if let Some(value) = value {
                write!(f, ", {name} = {value:.2}")?;
            }
        }
        for (name, value) in [("matrix", self.matrix), ("narrow", self.narrow)] {
            if let Some(value) = value {
                write!(f, ", {name} = {value}")?;
            }
        }
        write!(f, " }}")
    }
}

/// By the kernel's name.
pub(crate) type Kernels = BTreeMap<String, Numbers>;

/// By the device's name.
pub(crate) struct Table(BTreeMap<String, Kernels>);

/// Another version of a compiler may need a little more: what is more than this times the ceiling
/// is a fault. Where a ceiling is 0, nothing is allowed.
const ROOM: f64 = 1.15;

const HEADING: &str = "\
# What vendors' compilers make of the kernels that Kyklos chooses on their GPUs. Written by `scripts/check/vendors.sh --bless`,
# checked by `scripts/check/vendors.sh`. The words are explained in `src/table.rs`.
";

impl Table {
    pub(crate) fn read() -> Result<Self, String> {
        let path = path();
        let text = std::fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        toml::from_str(&text).map(Self).map_err(|error| format!("{}: {error}", path.display()))
    }

    pub(crate) fn set(&mut self, device: &str, kernels: Kernels) {
        self.0.insert(device.to_owned(), kernels);
    }

    pub(crate) fn write(&self) -> Result<(), String> {
        let mut text = HEADING.to_owned();
        for (device, kernels) in &self.0 {
            text += &format!("\n[{device}]\n");
            for (kernel, numbers) in kernels {
                text += &format!("{kernel} = {numbers}\n");
            }
        }
        std::fs::write(path(), text).map_err(|error| format!("{}: {error}", path().display()))
    }

    /// Where `measured` is above the ceilings of `device`, or has none.
    pub(crate) fn faults(&self, device: &str, measured: &Kernels) -> Vec<String> {
        let mut faults = Vec::new();
        for (kernel, now) in measured {
            let Some(ceiling) = self.0.get(device).and_then(|kernels| kernels.get(kernel)) else {
                faults.push(format!("{device} {kernel}: the table has no ceilings for it: {now}"));
                continue;
            };
            let over = |now: f64, ceiling: f64| now > ceiling * ROOM;
            let counts = [
                ("spills", now.spills, ceiling.spills),
                ("scratch", now.scratch, ceiling.scratch),
                ("registers", now.registers, ceiling.registers),
                ("code", now.code, ceiling.code),
            ];
            let ratios = [
                ("per_multiply_add", now.per_multiply_add, ceiling.per_multiply_add),
                ("shared_bytes", now.shared_bytes, ceiling.shared_bytes),
                ("narrow", now.narrow.map(|count| count as f64), ceiling.narrow.map(|count| count as f64)),
            ];
            let worse = counts.iter().any(|(_, now, ceiling)| over(*now as f64, *ceiling as f64))
                || over(ceiling.occupancy as f64, now.occupancy as f64)
                || now.matrix < ceiling.matrix
                || ratios.iter().any(|(_, now, ceiling)| match (now, ceiling) {
                    (Some(now), Some(ceiling)) => over(*now, *ceiling),
                    (None, Some(_)) => true,
                    (_, None) => false,
                });
            if worse {
                faults
                    .push(format!("{device} {kernel}: now     {now}\n{device} {kernel}: ceiling {ceiling}"));
            }
        }
        faults
    }
}

fn path() -> PathBuf {
    std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("ceilings.toml")
}

#[cfg(test)]
mod tests {
    use super::*;

    const CEILING: Numbers = Numbers {
        spills: 0,
        scratch: 0,
        registers: 100,
        occupancy: 16,
        code: 1000,
        per_multiply_add: Some(1.0),
        shared_bytes: Some(2.0),
        matrix: Some(32),
        narrow: Some(16),
    };

    fn faults(now: Numbers) -> usize {
        let kernels = |numbers| BTreeMap::from([("a".to_owned(), numbers)]);
        Table(BTreeMap::from([("gpu".to_owned(), kernels(CEILING))])).faults("gpu", &kernels(now)).len()
    }

    #[test]
    fn what_is_worse_than_its_ceiling_is_a_fault_and_what_is_new_too() {
        assert_eq!(faults(CEILING), 0);
        assert_eq!(
            faults(Numbers { registers: 114, code: 1149, occupancy: 14, ..CEILING }),
            0,
            "within the room"
        );
        for worse in [
            Numbers { spills: 1, ..CEILING },
            Numbers { scratch: 4, ..CEILING },
            Numbers { registers: 116, ..CEILING },
            Numbers { occupancy: 13, ..CEILING },
            Numbers { code: 1151, ..CEILING },
            Numbers { per_multiply_add: Some(1.2), ..CEILING },
            Numbers { shared_bytes: Some(2.5), ..CEILING },
            Numbers { shared_bytes: None, ..CEILING },
            Numbers { matrix: Some(31), ..CEILING },
            Numbers { matrix: None, ..CEILING },
            Numbers { narrow: Some(19), ..CEILING },
        ] {
            assert_eq!(faults(worse), 1, "{worse}");
        }
        let new = Table(BTreeMap::new()).faults("gpu", &BTreeMap::from([("a".to_owned(), CEILING)]));
        assert_eq!(new.len(), 1);
    }

    #[test]
    fn a_line_of_the_table_is_read_as_it_is_written() {
        let read: Kernels = toml::from_str(&format!("a = {CEILING}\n")).expect("it was written");
        assert_eq!(read["a"], CEILING);
    }
}
