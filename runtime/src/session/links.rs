//! The machine of a group, as its ranks measure it: devices, and the links between them.

use std::collections::BTreeMap;

use bytes::Bytes;
use kyklos_transport::{Rank, Tag};
use serde::{Deserialize, Serialize};

use super::Session;
use crate::backend::{Backend, Extent, Layout};
use crate::collective::{ExchangeError, Incoming, Memory, Outgoing, Piece};
use crate::error::{Error, Result};
use crate::meter::Meter;
use kyklos_plan::AttentionProblem;
use kyklos_plan::plan::BufferId;
use kyklos_plan::simulate::{
    AttentionRate, Between, Capacity, Cluster, Description, DeviceCount, DeviceDescription, Duplex,
    HostDescription, LinkDescription, MemoryKind,
};

/// What one rank has measured of the messages from another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Seen {
    /// Nanoseconds of a message of a few bytes.
    hop_ns: u64,
    /// Nanoseconds of a long one.
    bulk_ns: u64,
}

/// The link between two ranks, in the slower direction.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Link {
    hop_ns: u64,
    bytes_per_s: f64,
}

impl Session {
    /// The machine of this group, for [`kyklos_plan::simulate::choose`]: each rank is a host with
    /// one device. Speeds of attention are those of calls like `problem`
    /// ([`Self::capacities`]); those of messages are of exchanges between all ranks at once, from
    /// device to device. Takes about a tenth of a second for each pair of ranks. All ranks call it,
    /// at the same place in their calls, and get the same. Blocks.
    ///
    /// ```
    /// # #[cfg(feature = "cpu")] {
    /// use kyklos::backend::Device;
    /// use kyklos::local::on_threads;
    /// use kyklos::{AttentionProblem, Dtype, Mask, Session};
    /// use kyklos_transport::in_process_group;
    ///
    /// let machines = on_threads(in_process_group(2), |group| {
    ///     let problem = AttentionProblem::new([1, 100, 4, 4, 32], Dtype::F32, Mask::full())?;
    ///     let cluster = Session::new(group, Device::cpu()).cluster(&problem)?;
    ///     Ok::<_, kyklos::Error>(cluster.to_toml()?)
    /// });
    /// let [first, second] = machines.try_into().expect("two ranks");
    /// assert_eq!(first?, second?);
    /// # }
    /// # Ok::<(), kyklos::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Self::attend`]; [`Error::Request`] for a group of more than 64 ranks.
    pub fn cluster(&mut self, problem: &AttentionProblem) -> Result<Cluster> {
        let size = self.group.size();
        if size > MOST_RANKS {
            return Err(Error::request(
                format!("the links of {size} ranks"),
                format!("measure groups of at most {MOST_RANKS}, or describe the machine in a file"),
            ));
        }
        let capacities = self.capacities(problem)?;
        pollster::block_on(async {
            let copied = self.copy_ns().await;
            let copied = self.or_refuse(copied).await?;
            let copies: Vec<u64> = self
                .exchange("copies", Some(copied))
                .await?
                .iter()
                .filter_map(|rank| rank.measured)
                .collect();
            let mut links = BTreeMap::new();
            for shift in 1..size {
                self.shift(shift, &mut links).await?;
            }
            described(problem, &capacities, &copies, &links)
        })
    }

    /// Measures the messages of all ranks to the one `shift` behind.
    async fn shift(&mut self, shift: u32, links: &mut BTreeMap<(u32, u32), Link>) -> Result<()> {
        let words = format!("links, shift {shift}");
        let mut bytes = FIRST_BYTES;
        loop {
            // All ranks have ended what was before.
            self.exchange::<Seen>(&words, None).await?;
            let measured = self.seen(shift, bytes).await;
            let all = self.exchange(&words, Some(measured?)).await?;
            let all: Vec<Seen> = all.iter().filter_map(|rank| rank.measured).collect();
            let longest_ns = all.iter().map(|seen| seen.bulk_ns).max().unwrap_or(0);
            if longest_ns < LONG_ENOUGH_NS && bytes < MOST_BYTES {
                bytes *= 4;
                continue;
            }
            for (to, seen) in (0..self.group.size()).zip(all) {
                let from = (to + self.group.size() - shift) % self.group.size();
                // What is left of the long message is its bytes.
                let bytes_ns = seen.bulk_ns.saturating_sub(seen.hop_ns).max(seen.bulk_ns / 10).max(1);
                #[expect(clippy::cast_precision_loss, reason = "megabytes and seconds")]
                let link = Link { hop_ns: seen.hop_ns, bytes_per_s: bytes as f64 * 1e9 / bytes_ns as f64 };
                let known = links.entry((from.min(to), from.max(to))).or_insert(link);
                known.hop_ns = known.hop_ns.max(link.hop_ns);
                known.bytes_per_s = known.bytes_per_s.min(link.bytes_per_s);
            }
            return Ok(());
        }
    }

    /// Messages to the rank `shift` behind and from the one before.
    async fn seen(&mut self, shift: u32, bytes: usize) -> Result<Seen> {
        let op = self.take_operation();
        let clock = self.options.run.clock.clone();
        // Of the same kind as those of a run: on the device.
        let small = self.device.upload("probe of a link", Bytes::from(vec![0; FEW_BYTES]));
        let bulk = self.device.upload("probe of a link", Bytes::from(vec![0; bytes]));
        let (small, bulk) = match (small, bulk) {
            (Ok(small), Ok(bulk)) => (small, bulk),
            (Err(error), _) | (_, Err(error)) => {
                self.end_call(&error);
                return Err(error);
            }
        };
        let mut memory = Memory::from(vec![vec![small], vec![bulk]]);
        let mut message = 0;
        // The first one allocates, and of the others each follows the one before on all ranks.
        self.move_bytes(&mut memory, (0, FEW_BYTES), Tag { op, message }, shift).await?;
        let began_ns = clock.now_ns();
        for _ in 0..HOPS {
            message += 1;
            self.move_bytes(&mut memory, (0, FEW_BYTES), Tag { op, message }, shift).await?;
        }
        let hop_ns = (clock.now_ns() - began_ns) / u64::from(HOPS);
        let mut bulk_ns = u64::MAX;
        for _ in 0..BULKS {
            message += 1;
            let began_ns = clock.now_ns();
            self.move_bytes(&mut memory, (1, bytes), Tag { op, message }, shift).await?;
            bulk_ns = bulk_ns.min(clock.now_ns() - began_ns);
        }
        Ok(Seen { hop_ns, bulk_ns })
    }

    /// One message each way, of so many bytes of a buffer of `memory`.
    async fn move_bytes(
        &self,
        memory: &mut Memory<<crate::backend::Device as Backend>::Buffer>,
        (buffer, bytes): (usize, usize),
        tag: Tag,
        shift: u32,
    ) -> Result<()> {
        let (own, size) = (self.rank().0, self.group.size());
        let piece = Piece { buffer: BufferId(buffer), tensor: 0, bytes: 0..bytes, is_whole: true };
        let send = Outgoing { to: Rank((own + shift) % size), pieces: vec![piece] };
        let recv = Incoming { from: Rank((own + size - shift) % size), piece_bytes: vec![bytes] };
        let meter = Meter::new(self.options.run.clock.clone(), false);
        let moved = self.collective.post_exchange(&self.device, &meter, tag, memory, &[send], &[recv]).await;
        let moved = match (moved, self.collective.settled(tag)) {
            (Ok(_), Some(settled)) => settled.await,
            (moved, _) => moved.map(|_| ()),
        };
        let moved = moved.map_err(|error| match error {
            ExchangeError::Transport(error) => error.into(),
            ExchangeError::Own(error) => error,
        });
        let done = match moved {
            Ok(()) => self.device.wait().await,
            failed => failed,
        };
        done.inspect_err(|error| self.end_call(error))
    }

    /// Nanoseconds of a copy of [`COPIED`] bytes on the device.
    async fn copy_ns(&self) -> Result<u64> {
        let from = self.device.upload("probe of copies", Bytes::from(vec![0; COPIED]))?;
        let mut into = self.device.alloc("probe of copies", COPIED)?;
        let extent = Extent { batch: 1, rows: COPIED / ROW_BYTES / 4, heads: 4, row_bytes: ROW_BYTES };
        let dense =
            Layout { offset: 0, batch_stride: COPIED, row_stride: 4 * ROW_BYTES, head_stride: ROW_BYTES };
        let clock = &self.options.run.clock;
        let mut least_ns = u64::MAX;
        for _ in 0..BULKS {
            let began_ns = clock.now_ns();
            self.device.repack((&from, dense), (&mut into, dense), extent)?;
            self.device.wait().await?;
            least_ns = least_ns.min(clock.now_ns() - began_ns);
        }
        Ok(least_ns.max(1))
    }
}

/// The description of what the ranks have measured.
#[expect(clippy::cast_precision_loss, reason = "speeds and times, to a few digits")]
fn described(
    problem: &AttentionProblem,
    capacities: &[Capacity],
    copies_ns: &[u64],
    links: &BTreeMap<(u32, u32), Link>,
) -> Result<Cluster> {
    let name = |rank: usize| format!("rank-{rank}");
    let device = |(capacity, copy_ns): (&Capacity, &u64)| DeviceDescription {
        memory_gib: capacity.memory_bytes.map(|bytes| bytes as f64 / f64::from(1 << 30)),
        attention: vec![AttentionRate {
            dtype: problem.dtype.name().to_owned(),
            head_dim: problem.head_dim,
            gflop_per_s: capacity.pairs_per_s.max(1) as f64 * 4.0 * f64::from(problem.head_dim) / 1e9,
            share_of_it: 1.0,
            backward_products: BACKWARD_PRODUCTS,
        }],
        tile_rows: 1,
        tile_keys: 1,
        attend_step_us: capacity.step_ns as f64 / 1e3,
        piece_ms: 100.0,
        piece_us: 0.0,
        copy_gb_per_s: COPIED as f64 / *copy_ns as f64,
        state_gb_per_s: None,
        key_gb_per_s: None,
        copy_us: 0.0,
        // The measured time of a message includes what is copied to the host.
        memory: MemoryKind::Unified,
        staging_gb_per_s: None,
    };
    let host = |rank: usize| HostDescription {
        name: name(rank),
        count: 1,
        grow: false,
        devices: vec![DeviceCount { kind: name(rank), count: 1 }],
        inside: None,
        nic: None,
        uplink: None,
    };
    let of_link = |link: &Link| LinkDescription {
        gb_per_s: link.bytes_per_s / 1e9,
        // A message takes it twice.
        latency_us: link.hop_ns as f64 / 2e3,
        message_us: 0.0,
        duplex: Duplex::Full,
        host_s_per_gb: 0.0,
        device_memory: false,
    };
    let devices = capacities.iter().zip(copies_ns).map(device);
    Ok(Cluster::new(Description {
        name: format!("a group of {} ranks", capacities.len()),
        about: "Measured by its ranks, all of them at work.".to_owned(),
        between_hosts: None,
        rank_on_device: None,
        share_devices: false,
        device: (0..).map(name).zip(devices).collect(),
        link: links.iter().map(|((a, b), link)| (format!("{a}-{b}"), of_link(link))).collect(),
        host: (0..capacities.len()).map(host).collect(),
        between: (links.keys())
            .map(|(a, b)| Between { hosts: [name(*a as usize), name(*b as usize)], link: format!("{a}-{b}") })
            .collect(),
    })?)
}

/// Each pair of ranks is measured.
const MOST_RANKS: u32 = 64;
const FEW_BYTES: usize = 64;
const FIRST_BYTES: usize = 256 << 10;
const MOST_BYTES: usize = 16 << 20;
/// Of a message whose speed counts.
const LONG_ENOUGH_NS: u64 = 20_000_000;
/// Messages of a few bytes, one after the other.
const HOPS: u32 = 8;
/// Long messages and copies; the fastest counts.
const BULKS: u32 = 3;
const COPIED: usize = 8 << 20;
const ROW_BYTES: usize = 256;
/// Where gradients are not measured: products of one kernel for queries and one for keys.
const BACKWARD_PRODUCTS: f64 = 7.0;

#[cfg(test)]
mod tests {
    use super::*;
    use kyklos_plan::simulate::{PlanQuery, choose};
    use kyklos_plan::{Dtype, Mask, Split, Strategy};

    /// Two ranks of 1 TFLOP/s with a link, and a problem whose attention takes 0.55 s on both.
    fn first_choice(bytes_per_s: f64) -> (Strategy, u64) {
        let problem = AttentionProblem::new([1, 32768, 8, 8, 32], Dtype::F16, Mask::full()).unwrap();
        let capacity = Capacity { pairs_per_s: 7_812_500_000, step_ns: 10_000, memory_bytes: None };
        let links = BTreeMap::from([((0, 1), Link { hop_ns: 200_000, bytes_per_s })]);
        let cluster = described(&problem, &[capacity, capacity], &[1_000_000; 2], &links).unwrap();
        let wanted = PlanQuery {
            ranks: 2,
            mesh: None,
            strategy: None,
            placement: None,
            split: Split::Even,
            gradients: false,
        };
        let best = choose(&problem, &wanted, &cluster).unwrap().remove(0);
        (best.candidate.strategy, best.prediction().unwrap().wall_ns)
    }

    #[test]
    fn a_slow_link_makes_a_call_longer_than_its_attention() {
        let (_, fast_ns) = first_choice(1e10);
        let (_, slow_ns) = first_choice(1e7);
        let alone_ns = 1_099_511_627;
        assert!(fast_ns > alone_ns / 2 && fast_ns < alone_ns * 6 / 10, "{fast_ns}");
        assert!(slow_ns > alone_ns, "{slow_ns}");
    }
}
