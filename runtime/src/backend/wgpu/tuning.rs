//! Measured choices of kernel variants, and when they apply.
//!
//! The library measures nothing and reads no files: the caller passes a [`TuningTable`]. An entry
//! applies only to its device, driver, kernel choice and kernel texts; without an entry that
//! applies the built-in choice is used.

use std::collections::HashMap;

use kyklos_shaders::{AttendKernel, AttendVariant, BiasInput, Kernel, Storage};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::numbers::storage;
use super::variant::{DIALECT, MOST_SLOTS, Variants};
use crate::backend::StateShape;
use kyklos_plan::Dtype;

/// Measured choices of kernel variants, each for one kind of call on one device. Serialises as a
/// list of entries.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct TuningTable {
    entries: Vec<TuningEntry>,
}

/// A measured choice.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TuningEntry {
    /// To which calls on which device it applies.
    pub key: TuningKey,
    /// The fastest variant; serialised by [its name](AttendVariant::name).
    #[serde(serialize_with = "write_variant", deserialize_with = "read_variant")]
    pub variant: AttendVariant,
}

/// To which calls a choice applies. All fields must be equal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TuningKey {
    /// Device and driver.
    pub adapter: AdapterKey,
    /// The [`KernelChoice`](super::KernelChoice) among whose variants the choice was made, by its
    /// name.
    pub kernel: String,
    /// Storage type of q, k and v.
    pub dtype: String,
    /// Elements of a head.
    pub head_dim: u32,
    /// Shapes of the running state.
    pub bucket: ShapeBucket,
    /// Hash of the texts of all kernels among which the choice was made, so that a changed kernel
    /// invalidates it.
    pub sources: String,
}

/// A device with its driver, as the driver names them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdapterKey {
    /// The device's own name.
    pub name: String,
    /// PCI vendor, or the API's substitute for it.
    pub vendor: u32,
    /// PCI device, or the API's substitute for it.
    pub device: u32,
    /// Vulkan, Metal, DX12 or WebGPU.
    pub backend: String,
    /// Name of the driver.
    pub driver: String,
    /// Version of the driver.
    pub driver_info: String,
}

/// Shapes that share a choice: calls with about as many query rows, counted over heads and batch.
///
/// A variant fixes the number of rows of a workgroup. That balances the work for each loaded key
/// against the number of workgroups, so the best choice depends on the number of rows, up to the
/// number that fills any device. The number of keys and the mask change the time of all variants
/// alike, so neither is part of a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ShapeBucket {
    /// floor(log4(query rows x heads x batch)), at most 8: 65536 and more are one bucket.
    pub row_heads_log4: u32,
}

impl TuningTable {
    /// All entries.
    pub fn entries(&self) -> &[TuningEntry] {
        &self.entries
    }

    /// Adds an entry. Replaces entries with the same key, also entries for other kernel texts.
    pub fn set(&mut self, entry: TuningEntry) {
        self.forget(&entry.key);
        self.entries.push(entry);
    }

    /// Removes the entries with this key, also entries for other kernel texts.
    pub fn forget(&mut self, key: &TuningKey) {
        self.entries.retain(|entry| TuningKey { sources: key.sources.clone(), ..entry.key.clone() } != *key);
    }
}

impl AdapterKey {
    pub(super) fn new(info: &wgpu::AdapterInfo) -> Self {
        Self {
            name: info.name.clone(),
            vendor: info.vendor,
            device: info.device,
            backend: info.backend.to_str().to_owned(),
            driver: info.driver.clone(),
            driver_info: info.driver_info.clone(),
        }
    }
}

impl ShapeBucket {
    /// The bucket of a running state. `None` for an empty one, and for so few rows that the
    /// decoding kernels may be used.
    pub fn of(shape: StateShape) -> Option<Self> {
        let row_heads = shape.batch.saturating_mul(shape.rows).saturating_mul(shape.heads);
        if shape.rows <= MOST_SLOTS || row_heads == 0 {
            return None;
        }
        Some(Self { row_heads_log4: (row_heads.ilog2() / 2).min(FULL_LOG4) })
    }
}

/// The entries of a table that apply to an open device.
#[derive(Debug, Default)]
pub(super) struct Tuned(HashMap<(Dtype, u32, ShapeBucket), AttendVariant>);

impl Tuned {
    pub(super) fn new(table: Option<&TuningTable>, adapter: &AdapterKey, variants: Variants) -> Self {
        let mut hashes = HashMap::new();
        let mut tuned = HashMap::new();
        let kernel = variants.choice_name();
        let entries = table.map_or(&[][..], TuningTable::entries).iter();
        for TuningEntry { key, variant } in entries.filter(|entry| entry.key.adapter == *adapter) {
            let Ok(dtype) = key.dtype.parse::<Dtype>() else { continue };
            let made =
                key.head_dim.is_multiple_of(8) && (8..=kyklos_shaders::MAX_HEAD_DIM).contains(&key.head_dim);
            if !made
                || key.kernel != kernel
                || !variants.choices(storage(dtype), key.head_dim).contains(variant)
            {
                continue;
            }
            let hash = hashes
                .entry((dtype, key.head_dim))
                .or_insert_with(|| sources(variants, storage(dtype), key.head_dim));
            if *hash == key.sources {
                tuned.insert((dtype, key.head_dim, key.bucket), *variant);
            }
        }
        Self(tuned)
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn get(&self, dtype: Dtype, head_dim: u32, shape: StateShape) -> Option<AttendVariant> {
        self.0.get(&(dtype, head_dim, ShapeBucket::of(shape)?)).copied()
    }
}

/// Hash of the texts of all kernels that can be chosen for these tensors.
pub(super) fn sources(variants: Variants, storage: Storage, head_dim: u32) -> String {
    let mut hasher = blake3::Hasher::new();
    for variant in variants.choices(storage, head_dim) {
        for softcap in [false, true] {
            let kernel =
                Kernel::Attend(AttendKernel { variant, storage, head_dim, softcap, bias: BiasInput::None });
            let text = kernel.source(DIALECT);
            hasher.update(&(text.len() as u64).to_le_bytes());
            hasher.update(text.as_bytes());
        }
    }
    hasher.finalize().to_hex().to_string()
}

fn write_variant<S: Serializer>(variant: &AttendVariant, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&variant.name())
}

fn read_variant<'de, D: Deserializer<'de>>(deserializer: D) -> Result<AttendVariant, D::Error> {
    String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
}

/// The last bucket, which has no upper bound: so many rows fill any device.
const FULL_LOG4: u32 = 8;

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(sources: &str, variant: AttendVariant) -> TuningEntry {
        let adapter = AdapterKey {
            name: "a".to_owned(),
            vendor: 1,
            device: 2,
            backend: "vulkan".to_owned(),
            driver: "d".to_owned(),
            driver_info: "1.0".to_owned(),
        };
        let bucket = ShapeBucket { row_heads_log4: 6 };
        let key = TuningKey {
            adapter,
            kernel: "auto".to_owned(),
            dtype: "f32".to_owned(),
            head_dim: 64,
            bucket,
            sources: sources.to_owned(),
        };
        TuningEntry { key, variant }
    }

    #[test]
    fn buckets_count_rows_over_heads_and_batch_in_steps_of_four() {
        let of = |batch, rows, heads| {
            ShapeBucket::of(StateShape { batch, rows, heads, dim: 64 }).map(|bucket| bucket.row_heads_log4)
        };
        assert_eq!(of(1, 1024, 8), Some(6));
        assert_eq!(of(2, 512, 8), Some(6));
        assert_eq!(of(1, 511, 8), Some(5));
        assert_eq!(of(1, 17, 1), Some(2));
        assert_eq!(of(4, 1 << 20, 64), Some(8));
        assert_eq!(of(64, 16, 64), None, "decoding has kernels of its own");
        assert_eq!(of(0, 1024, 8), None);
    }

    #[test]
    fn a_table_has_one_entry_for_a_key_and_drops_outdated_ones() {
        let mut table = TuningTable::default();
        let [two, four] = ["portable-2x4", "portable-4x4"].map(|name| name.parse().unwrap());
        table.set(entry("old", two));
        table.set(entry("new", four));
        assert_eq!(table.entries(), [entry("new", four)]);
        let mut other = entry("new", two);
        other.key.head_dim = 128;
        table.set(other.clone());
        assert_eq!(table.entries().len(), 2);
        table.forget(&entry("newer", two).key);
        assert_eq!(table.entries(), [other]);
    }

    #[test]
    fn entries_are_written_by_name_and_read_again() {
        let entry = entry("00", AttendVariant::SubgroupBroadcast { subgroup_size: 8, rows_per_lane: 3 });
        let text = serde_json::to_string(&entry).unwrap();
        assert!(text.contains("\"subgroup-broadcast-8x3\""), "{text}");
        assert_eq!(serde_json::from_str::<TuningEntry>(&text).unwrap(), entry);
        assert!(serde_json::from_str::<TuningEntry>(&text.replace("8x3", "8x03")).is_err());
    }
}
