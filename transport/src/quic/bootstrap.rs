//! How ranks become a group: everyone finds rank 0, rank 0 tells everyone where the others are, and of every two
//! ranks the higher one dials the lower one.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use quinn::{Connection, ConnectionError, Endpoint, Incoming, SendStream};
use tokio::sync::{Semaphore, mpsc};
use tokio::time::{Instant, timeout, timeout_at};

use super::QuicConfig;
use super::control::{close_code, describe};
use super::core::COORDINATOR;
use super::frames::FrameReader;
use super::identity::rank_name;
use super::tls::{self, Path, TlsConfigs};
use crate::error::TransportError;
use crate::transport::Rank;
use crate::wire::{Frame, MAX_WORLD, PROTOCOL_VERSION, Purpose, RejectCode};

/// A connection whose other side is known and welcome.
#[derive(Debug)]
pub(crate) struct Joined {
    pub(crate) rank: Rank,
    pub(crate) connection: Connection,
    pub(crate) send: SendStream,
    pub(crate) frames: FrameReader,
}

/// All connections of a rank.
#[derive(Debug, Default)]
pub(crate) struct Mesh {
    pub(crate) control: Vec<Joined>,
    pub(crate) data: Vec<Joined>,
}

/// Forms the group: all connections of this rank, once every rank has all of its own.
pub(crate) async fn form(
    config: &QuicConfig,
    endpoint: &Endpoint,
    tls: &TlsConfigs,
) -> Result<Mesh, TransportError> {
    let deadline = Instant::now() + config.connect_deadline;
    let (arrived, arrivals) = mpsc::channel(64);
    let door = Arc::new(Door {
        config: config.clone(),
        tls: tls.clone(),
        taken: Mutex::new(HashMap::new()),
        arrived,
        visitors: Semaphore::new(MOST_VISITORS),
    });
    tokio::spawn(Arc::clone(&door).listen(endpoint.clone()));
    if config.world == 1 {
        return Ok(Mesh::default());
    }
    let mut forming = Forming {
        config,
        endpoint,
        tls,
        deadline,
        arrivals,
        early_data: Vec::new(),
    };
    let formed = if config.rank == COORDINATOR {
        forming.as_coordinator().await
    } else {
        forming.as_member().await
    };
    if let Err(error) = &formed {
        // Those who wait for this rank learn why they need not.
        endpoint.close(close_code::REJECTED, cut(&error.to_string()).as_bytes());
        let _ = timeout(GOODBYE_PATIENCE, endpoint.wait_idle()).await;
    }
    formed
}

/// Checks that need no network.
pub(crate) fn check(config: &QuicConfig) -> Result<(), TransportError> {
    let QuicConfig {
        rank,
        world,
        job,
        identity,
        heartbeat,
        ..
    } = config;
    if *world == 0 || *world > MAX_WORLD {
        return Err(failed(format!("a group has 1 to {MAX_WORLD} ranks, not {world}")));
    }
    if rank.0 >= *world {
        return Err(failed(format!("rank {rank} is not in a group of {world} ranks")));
    }
    if heartbeat.is_zero() {
        return Err(failed("a heartbeat needs a period longer than 0"));
    }
    let (proven_rank, proven_job) = identity.rank_and_job()?;
    if proven_rank != *rank {
        return Err(failed(format!(
            "this is rank {rank}, but its identity is rank {proven_rank}'s"
        )));
    }
    if proven_job != *job {
        return Err(failed(format!(
            "this is job {job}, but the identity is of job {proven_job}"
        )));
    }
    Ok(())
}

struct Forming<'a> {
    config: &'a QuicConfig,
    endpoint: &'a Endpoint,
    tls: &'a TlsConfigs,
    deadline: Instant,
    arrivals: mpsc::Receiver<(Purpose, Joined)>,
    /// Data connections that came while control connections were awaited.
    early_data: Vec<Joined>,
}

impl Forming<'_> {
    async fn as_coordinator(&mut self) -> Result<Mesh, TransportError> {
        let world = self.config.world;
        let mut control: Vec<Option<Joined>> = (0..world).map(|_| None).collect();
        let missing = |control: &[Option<Joined>]| {
            (1..world)
                .filter(|&rank| control[rank as usize].is_none())
                .collect::<Vec<_>>()
        };
        while !missing(&control).is_empty() {
            match timeout_at(self.deadline, self.arrivals.recv()).await {
                Ok(Some((Purpose::Control, joined))) => {
                    let rank = joined.rank.0 as usize;
                    control[rank] = Some(joined);
                }
                Ok(Some((Purpose::Data, joined))) => self.early_data.push(joined),
                Ok(None) => return Err(failed("the endpoint has been closed")),
                Err(_) => return Err(self.too_late(&missing(&control))),
            }
        }
        let mut control: Vec<Joined> = control.into_iter().flatten().collect();
        // The same socket dials and listens, so where a rank's packets come from is where it can be reached.
        let mut addresses = vec![self.config.coordinator];
        addresses.extend(control.iter().map(|member| member.connection.remote_address()));
        let table = Frame::AddressTable { addresses };
        for member in &mut control {
            self.say(member, &table).await?;
        }
        let data = self.collect_data(Vec::new()).await?;
        for member in &mut control {
            self.expect(member, &Frame::Meshed).await?;
        }
        for member in &mut control {
            self.say(member, &Frame::Start).await?;
        }
        Ok(Mesh { control, data })
    }

    async fn as_member(&mut self) -> Result<Mesh, TransportError> {
        let mut control = self.dial_coordinator().await?;
        let addresses = match self.next_frame(&mut control).await? {
            Frame::AddressTable { addresses } if addresses.len() == self.config.world as usize => addresses,
            other => {
                return Err(failed(format!(
                    "rank 0 sent {other:?} instead of the address table"
                )));
            }
        };
        let mut data = Vec::new();
        for rank in (0..self.config.rank.0).map(Rank) {
            // This rank reached the coordinator under the address it was given; the table may hold another one.
            let address = if rank == COORDINATOR {
                self.config.coordinator
            } else {
                addresses[rank.0 as usize]
            };
            data.push(self.dial(rank, address, Purpose::Data).await?);
        }
        let data = self.collect_data(data).await?;
        self.say(&mut control, &Frame::Meshed).await?;
        self.expect(&mut control, &Frame::Start).await?;
        Ok(Mesh {
            control: vec![control],
            data,
        })
    }

    /// Rank 0 may start later than this rank: tries again until the deadline.
    async fn dial_coordinator(&self) -> Result<Joined, TransportError> {
        let address = self.config.coordinator;
        loop {
            let attempt = self.dial(COORDINATOR, address, Purpose::Control);
            match timeout_at(self.deadline, attempt).await {
                Ok(Err(error)) if error == no_answer(COORDINATOR, address) => {}
                Ok(ended) => return ended,
                Err(_) => {
                    let text = format!(
                        "rank 0 did not answer at {address} within {:?}: is it running, and does UDP get through?",
                        self.config.connect_deadline
                    );
                    return Err(failed(text));
                }
            }
        }
    }

    async fn dial(
        &self,
        rank: Rank,
        address: SocketAddr,
        purpose: Purpose,
    ) -> Result<Joined, TransportError> {
        let config = self.tls.client(purpose, Path::of_endpoint(self.config.bind));
        let name = rank_name(rank, self.config.job);
        let connecting = self
            .endpoint
            .connect_with(config, address, &name)
            .map_err(|error| failed(format!("cannot dial rank {rank} at {address}: {error}")))?;
        let connection = match timeout(DIAL_PATIENCE, connecting).await {
            Ok(Ok(connection)) => connection,
            Ok(Err(ConnectionError::TimedOut)) | Err(_) => return Err(no_answer(rank, address)),
            Ok(Err(error)) => {
                return Err(failed(format!(
                    "rank {rank} at {address} refused the connection: {}",
                    describe(&error)
                )));
            }
        };
        let refused = |what: String| failed(format!("rank {rank} at {address} refused this rank: {what}"));
        let lost = |connection: &Connection, error: String| {
            refused(
                connection
                    .close_reason()
                    .map_or(error, |reason| describe(&reason)),
            )
        };
        if tls::proven_identity(&connection)? != (rank, self.config.job) {
            return Err(failed(format!(
                "whoever answers at {address} is not rank {rank} of this job"
            )));
        }
        let (send, recv) = connection
            .open_bi()
            .await
            .map_err(|error| lost(&connection, error.to_string()))?;
        let mut joined = Joined {
            rank,
            connection,
            send,
            frames: FrameReader::new(recv),
        };
        let hello = Frame::Hello {
            protocol: PROTOCOL_VERSION,
            purpose,
            job: self.config.job.0,
            epoch: self.config.epoch,
            rank: self.config.rank,
            world: self.config.world,
        };
        let written = joined.send.write_all(&hello.encode()).await;
        written.map_err(|error| lost(&joined.connection, error.to_string()))?;
        match timeout_at(self.deadline, joined.frames.next()).await {
            Ok(Ok(Some(Frame::Welcome {
                protocol: PROTOCOL_VERSION,
            }))) => Ok(joined),
            Ok(Ok(Some(Frame::Reject { text, .. }))) => Err(refused(text)),
            Ok(Ok(Some(other))) => Err(failed(format!("rank {rank} answered {other:?} to a hello"))),
            Ok(Ok(None)) => Err(refused("it ended the conversation".into())),
            Ok(Err(error)) => Err(lost(&joined.connection, error.to_string())),
            Err(_) => Err(refused("it does not answer".into())),
        }
    }

    /// Waits for the data connections of all higher ranks.
    async fn collect_data(&mut self, dialled: Vec<Joined>) -> Result<Vec<Joined>, TransportError> {
        let mut data: Vec<Option<Joined>> = (0..self.config.world).map(|_| None).collect();
        for joined in dialled.into_iter().chain(std::mem::take(&mut self.early_data)) {
            let rank = joined.rank.0 as usize;
            data[rank] = Some(joined);
        }
        loop {
            let ranks = 0..self.config.world;
            let others = ranks.filter(|&rank| rank != self.config.rank.0);
            let missing: Vec<u32> = others.filter(|&rank| data[rank as usize].is_none()).collect();
            if missing.is_empty() {
                return Ok(data.into_iter().flatten().collect());
            }
            match timeout_at(self.deadline, self.arrivals.recv()).await {
                Ok(Some((Purpose::Data, joined))) => {
                    let rank = joined.rank.0 as usize;
                    data[rank] = Some(joined);
                }
                // A rank that has started anew: it comes too late for this group, and finds out by its silence.
                Ok(Some((Purpose::Control, _))) => {}
                Ok(None) => return Err(failed("the endpoint has been closed")),
                Err(_) => return Err(self.too_late(&missing)),
            }
        }
    }

    async fn say(&self, to: &mut Joined, frame: &Frame) -> Result<(), TransportError> {
        let written = timeout_at(self.deadline, to.send.write_all(&frame.encode())).await;
        match written {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) | Err(_) => Err(self.lost(to)),
        }
    }

    async fn next_frame(&self, from: &mut Joined) -> Result<Frame, TransportError> {
        match timeout_at(self.deadline, from.frames.next()).await {
            Ok(Ok(Some(frame))) => Ok(frame),
            Ok(Ok(None) | Err(_)) => Err(self.lost(from)),
            Err(_) => {
                let text = format!(
                    "the group was not complete within {:?}",
                    self.config.connect_deadline
                );
                Err(failed(text))
            }
        }
    }

    async fn expect(&self, from: &mut Joined, expected: &Frame) -> Result<(), TransportError> {
        match self.next_frame(from).await? {
            frame if frame == *expected => Ok(()),
            other => Err(failed(format!(
                "rank {} sent {other:?} instead of {expected:?}",
                from.rank
            ))),
        }
    }

    fn lost(&self, joined: &Joined) -> TransportError {
        let reason = joined
            .connection
            .close_reason()
            .map_or_else(|| "no answer".into(), |reason| describe(&reason));
        failed(format!(
            "rank {} was lost before the group was complete: {reason}",
            joined.rank
        ))
    }

    fn too_late(&self, missing: &[u32]) -> TransportError {
        let shown: Vec<String> = missing.iter().take(8).map(u32::to_string).collect();
        let more = missing.len() - shown.len();
        let more = if more > 0 {
            format!(" and {more} more")
        } else {
            String::new()
        };
        failed(format!(
            "rank {}{more} did not come within {:?} (this is rank {} of {})",
            shown.join(", "),
            self.config.connect_deadline,
            self.config.rank,
            self.config.world
        ))
    }
}

/// Where connections come in, for as long as the endpoint lives.
struct Door {
    config: QuicConfig,
    tls: TlsConfigs,
    /// Who has been let in, to notice a second one of the same rank.
    taken: Mutex<HashMap<(bool, Rank), Connection>>,
    arrived: mpsc::Sender<(Purpose, Joined)>,
    visitors: Semaphore,
}

impl Door {
    async fn listen(self: Arc<Self>, endpoint: Endpoint) {
        while let Some(incoming) = endpoint.accept().await {
            if self.visitors.available_permits() == 0 {
                incoming.refuse();
                continue;
            }
            let door = Arc::clone(&self);
            tokio::spawn(async move {
                let Ok(_permit) = door.visitors.acquire().await else {
                    return;
                };
                if let Err(error) = door.receive(incoming).await {
                    tracing::info!(error, "turned a connection away");
                }
            });
        }
    }

    /// Lets one visitor in, or tells it why not.
    async fn receive(&self, incoming: Incoming) -> Result<(), String> {
        let config = Arc::new(self.tls.server(Path::of_endpoint(self.config.bind)));
        let connecting = incoming.accept_with(config).map_err(|error| error.to_string())?;
        let connection = timeout(VISIT_PATIENCE, connecting)
            .await
            .map_err(|_| "slow handshake")?;
        let connection = connection.map_err(|error| error.to_string())?;
        let talk = timeout(VISIT_PATIENCE, self.talk(&connection)).await;
        let refusal = match talk {
            Ok(Ok((purpose, joined))) => {
                // Nobody is waiting once the group is complete; then nobody is missing either.
                return self
                    .arrived
                    .send((purpose, joined))
                    .await
                    .map_err(|_| "the group is complete".into());
            }
            Ok(Err(Refusal { answer, code, text })) => {
                if let Some(mut answer) = answer {
                    let reject = Frame::Reject {
                        code,
                        text: text.clone(),
                    };
                    if answer.write_all(&reject.encode()).await.is_ok() && answer.finish().is_ok() {
                        let _ = timeout(GOODBYE_PATIENCE, answer.stopped()).await;
                    }
                }
                text
            }
            Err(_) => "no hello".into(),
        };
        connection.close(close_code::REJECTED, cut(&refusal).as_bytes());
        Err(refusal)
    }

    async fn talk(&self, connection: &Connection) -> Result<(Purpose, Joined), Refusal> {
        let silent = |code, text: String| Refusal {
            answer: None,
            code,
            text,
        };
        let (proven_rank, proven_job) =
            tls::proven_identity(connection).map_err(|error| silent(RejectCode::Rank, error.to_string()))?;
        let purpose = tls::negotiated_purpose(connection);
        let (send, recv) = connection
            .accept_bi()
            .await
            .map_err(|error| silent(RejectCode::Protocol, error.to_string()))?;
        let mut frames = FrameReader::new(recv);
        let hello = frames.next().await;
        let QuicConfig {
            rank: me,
            world,
            job,
            epoch,
            ..
        } = &self.config;
        let complaint = match hello {
            Ok(Some(Frame::Hello {
                protocol,
                purpose: said,
                job: said_job,
                epoch: said_epoch,
                rank,
                world: said_world,
            })) => {
                if protocol != PROTOCOL_VERSION {
                    let text = format!(
                        "rank {me} speaks protocol version {PROTOCOL_VERSION}, rank {rank} {protocol}"
                    );
                    Some((RejectCode::Version, text))
                } else if said_job != job.0 || proven_job != *job || said_epoch != *epoch {
                    Some((
                        RejectCode::Job,
                        format!("this is job {job}, epoch {epoch}: another job uses this address"),
                    ))
                } else if rank != proven_rank {
                    let text =
                        format!("it says it is rank {rank}, but its certificate is rank {proven_rank}'s");
                    Some((RejectCode::Rank, text))
                } else if said_world != *world {
                    let text = format!("rank {me} was told {world} ranks, rank {rank} was told {said_world}");
                    Some((RejectCode::World, text))
                } else if rank.0 >= *world || rank == *me {
                    Some((
                        RejectCode::Rank,
                        format!("rank {rank} has no place here: this is rank {me} of {world}"),
                    ))
                } else if Some(said) != purpose || (said == Purpose::Control && *me != COORDINATOR) {
                    Some((
                        RejectCode::Protocol,
                        format!("rank {me} does not take a connection for {said:?}"),
                    ))
                } else if !self.take(said, rank, connection) {
                    Some((
                        RejectCode::Duplicate,
                        format!("rank {rank} is here already: was it started twice?"),
                    ))
                } else {
                    None
                }
            }
            Ok(_) => Some((RejectCode::Protocol, "the first frame was not a hello".into())),
            Err(error) => Some((RejectCode::Protocol, error.to_string())),
        };
        if let Some((code, text)) = complaint {
            return Err(Refusal {
                answer: Some(send),
                code,
                text,
            });
        }
        let purpose = purpose.unwrap_or(Purpose::Data);
        let mut joined = Joined {
            rank: proven_rank,
            connection: connection.clone(),
            send,
            frames,
        };
        let welcome = Frame::Welcome {
            protocol: PROTOCOL_VERSION,
        }
        .encode();
        match joined.send.write_all(&welcome).await {
            Ok(()) => Ok((purpose, joined)),
            Err(error) => Err(silent(RejectCode::Protocol, error.to_string())),
        }
    }

    /// Notes that a rank is here. A rank whose connection has died may come again.
    fn take(&self, purpose: Purpose, rank: Rank, connection: &Connection) -> bool {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (purpose == Purpose::Control, rank);
        if taken
            .get(&key)
            .is_some_and(|earlier| earlier.close_reason().is_none())
        {
            return false;
        }
        taken.insert(key, connection.clone());
        true
    }
}

struct Refusal {
    /// Where the visitor can be told.
    answer: Option<SendStream>,
    code: RejectCode,
    text: String,
}

fn no_answer(rank: Rank, address: SocketAddr) -> TransportError {
    failed(format!("rank {rank} does not answer at {address}"))
}

fn failed(text: impl Into<String>) -> TransportError {
    TransportError::Bootstrap { text: text.into() }
}

/// What fits the reason of a close, which must fit one small packet.
fn cut(text: &str) -> &str {
    let mut end = text.len().min(700);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// Connections that may be on their way in at once.
const MOST_VISITORS: usize = 4096;

/// How long one attempt at a handshake may take before the next one.
const DIAL_PATIENCE: Duration = Duration::from_secs(4);

/// How long a visitor may take for its handshake, and again for its hello.
const VISIT_PATIENCE: Duration = Duration::from_secs(5);

/// How long to wait for the other side to have read why it is turned away.
const GOODBYE_PATIENCE: Duration = Duration::from_secs(1);
