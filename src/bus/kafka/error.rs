//! Errors of the client library in plain words.

use rdkafka::error::KafkaError;
use rdkafka::types::RDKafkaErrorCode as Code;

use super::context::Context;
use crate::bus::BusError;
use crate::id::Offset;

/// The error without the values of options, which can be secrets.
pub(super) fn words(error: &KafkaError) -> String {
    match error {
        KafkaError::ClientConfig(_, _, key, _) => format!("the value of {key} is not allowed"),
        KafkaError::ClientCreation(cause) => cause.clone(),
        error => match error.rdkafka_error_code() {
            Some(code) => code.to_string(),
            None => error.to_string(),
        },
    }
}

/// The error of a call that has no effect, or one that can be repeated.
pub(super) fn of_call(context: &Context, error: &KafkaError) -> BusError {
    let bus = context.bus().to_owned();
    // What connections reported says more than "timed out".
    let told = context.told();
    let cause = told.clone().unwrap_or_else(|| words(error));
    if context.is_refused() {
        return BusError::Refused { bus, cause };
    }
    match error.rdkafka_error_code() {
        Some(
            Code::BrokerTransportFailure
            | Code::AllBrokersDown
            | Code::Resolve
            | Code::OperationTimedOut
            | Code::RequestTimedOut
            | Code::WaitingForCoordinator,
        ) => BusError::Connect { bus, cause },
        Some(
            Code::LeaderNotAvailable
            | Code::NotLeaderForPartition
            | Code::BrokerNotAvailable
            | Code::ReplicaNotAvailable
            | Code::NetworkException
            | Code::CoordinatorLoadInProgress
            | Code::CoordinatorNotAvailable
            | Code::NotCoordinator
            | Code::OffsetNotAvailable
            | Code::UnknownTopicOrPartition
            | Code::UnknownPartition
            | Code::UnknownTopic,
        ) => BusError::Unknown { bus, cause: words(error) },
        Some(Code::Authentication | Code::SSL) => BusError::Refused { bus, cause },
        _ => BusError::Refused { bus, cause: words(error) },
    }
}

/// Codes that mean that the client cannot read the next entries.
const UNREADABLE: [Code; 8] = [
    Code::BadMessage,
    Code::BadCompression,
    Code::NotImplemented,
    Code::InvalidMessage,
    Code::InvalidMessageSize,
    Code::MessageSizeTooLarge,
    Code::UnsupportedCompressionType,
    Code::Underflow,
];

/// Whether an error of reading a partition says nothing of other partitions, and reading it again does not
/// help.
pub(super) fn is_of_one(error: &KafkaError) -> bool {
    let is_of_one = |code| UNREADABLE.contains(&code) || code == Code::TopicAuthorizationFailed;
    error.rdkafka_error_code().is_some_and(is_of_one)
}

/// The error of reading one partition, behind `after`.
pub(super) fn of_partition(
    context: &Context,
    error: &KafkaError,
    log: &str,
    after: Offset,
) -> BusError {
    let (log, cause) = (log.to_owned(), context.told().unwrap_or_else(|| words(error)));
    match error.rdkafka_error_code() {
        Some(
            Code::AutoOffsetReset
            | Code::OffsetOutOfRange
            | Code::LogTruncation
            | Code::UnknownTopicOrPartition
            | Code::UnknownPartition
            | Code::UnknownTopic,
        ) => BusError::Moved { log, after, cause },
        Some(code) if UNREADABLE.contains(&code) => BusError::Unreadable { log, after, cause },
        Some(Code::TopicAuthorizationFailed) => {
            BusError::Refused { bus: context.bus().to_owned(), cause: format!("{log}: {cause}") }
        }
        _ => of_call(context, error),
    }
}
