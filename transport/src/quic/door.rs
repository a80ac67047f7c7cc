//! Who comes in: every connection to this rank's endpoint is let in here, or told why not.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use quinn::{Connection, Endpoint, Incoming, SendStream};
use tokio::sync::{Semaphore, mpsc};
use tokio::time::timeout;

use super::QuicConfig;
use super::bootstrap::{GOODBYE_PATIENCE, Joined, cut};
use super::control::close_code;
use super::core::COORDINATOR;
use super::frames::FrameReader;
use super::tls::{self, Path, TlsConfigs};
use crate::transport::Rank;
use crate::wire::{Frame, PROTOCOL_VERSION, Purpose, RejectCode};

/// Where connections come in, for as long as the endpoint lives.
pub(crate) struct Door {
    config: QuicConfig,
    tls: TlsConfigs,
    /// Who has been let in, to notice a second one of the same rank.
    taken: Mutex<HashMap<(bool, Rank), Connection>>,
    arrived: mpsc::Sender<(Purpose, Joined)>,
    visitors: Semaphore,
}

impl Door {
    pub(crate) fn new(
        config: &QuicConfig,
        tls: &TlsConfigs,
        arrived: mpsc::Sender<(Purpose, Joined)>,
    ) -> Self {
        Self {
            config: config.clone(),
            tls: tls.clone(),
            taken: Mutex::new(HashMap::new()),
            arrived,
            visitors: Semaphore::new(MOST_VISITORS),
        }
    }

    pub(crate) async fn listen(self: Arc<Self>, endpoint: Endpoint) {
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
        let connection = timeout(VISIT_PATIENCE, connecting).await.map_err(|_| "slow handshake")?;
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
                    let reject = Frame::Reject { code, text: text.clone() };
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
        let silent = |code, text: String| Refusal { answer: None, code, text };
        let (proven_rank, proven_job) =
            tls::proven_identity(connection).map_err(|error| silent(RejectCode::Rank, error.to_string()))?;
        let purpose = tls::negotiated_purpose(connection);
        let (send, recv) =
            connection.accept_bi().await.map_err(|error| silent(RejectCode::Protocol, error.to_string()))?;
        let mut frames = FrameReader::new(recv);
        let hello = frames.next().await;
        let QuicConfig { rank: me, world, job, epoch, .. } = &self.config;
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
                    Some((RejectCode::Protocol, format!("rank {me} does not take a connection for {said:?}")))
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
            return Err(Refusal { answer: Some(send), code, text });
        }
        let purpose = purpose.unwrap_or(Purpose::Data);
        let mut joined = Joined { rank: proven_rank, connection: connection.clone(), send, frames };
        let welcome = Frame::Welcome { protocol: PROTOCOL_VERSION }.encode();
        match joined.send.write_all(&welcome).await {
            Ok(()) => Ok((purpose, joined)),
            Err(error) => Err(silent(RejectCode::Protocol, error.to_string())),
        }
    }

    /// Notes that a rank is here. A rank whose connection has died may come again.
    fn take(&self, purpose: Purpose, rank: Rank, connection: &Connection) -> bool {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (purpose == Purpose::Control, rank);
        if taken.get(&key).is_some_and(|earlier| earlier.close_reason().is_none()) {
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

/// Connections that may be on their way in at once.
const MOST_VISITORS: usize = 4096;

/// How long a visitor may take for its handshake, and again for its hello.
const VISIT_PATIENCE: Duration = Duration::from_secs(5);
