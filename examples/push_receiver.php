<?php
// A receiver for Fairlane's pushes in PHP.
//
//     FAIRLANE_SECRET="$(fairlane secret --bot shop-7)" php -S 127.0.0.1:9000 push_receiver.php
//
// and in fairlane.toml: handler = "push", url = "http://127.0.0.1:9000/". Without FAIRLANE_SECRET
// nothing is checked: for trying things out. RECEIVER_LOG=FILE appends a line of JSON per push.
//
// Put your own work into handle(). It gets the events of one bot in order, and never two calls for
// one bot at once. An event may come again after a crash: remember its id together with its effect.

const TOLERANCE = 300; // seconds that a request may be old, or our clock wrong

function handle(string $bot, array $event): void
{
    // Throw an exception when it cannot be done now: this event, and those behind it, come again.
}

// Whether Fairlane sent this (Standard Webhooks): one of its signatures is right, and new.
function is_signed(string $body): bool
{
    $secrets = array_filter(explode("\n", getenv('FAIRLANE_SECRET') ?: ''));
    if (!$secrets) {
        return true;
    }
    $id = $_SERVER['HTTP_WEBHOOK_ID'] ?? '';
    $stamp = $_SERVER['HTTP_WEBHOOK_TIMESTAMP'] ?? '';
    if (!ctype_digit($stamp) || abs(time() - (int) $stamp) > TOLERANCE) {
        return false;
    }
    foreach ($secrets as $secret) {
        $key = base64_decode(substr(trim($secret), strlen('whsec_')));
        $ours = 'v1,' . base64_encode(hash_hmac('sha256', "$id.$stamp.$body", $key, true));
        foreach (explode(' ', $_SERVER['HTTP_WEBHOOK_SIGNATURE'] ?? '') as $given) {
            if (hash_equals($ours, $given)) {
                return true;
            }
        }
    }
    return false;
}

function answer(int $status, array $value): never
{
    http_response_code($status);
    header('content-type: application/json');
    echo json_encode((object) $value);
    exit;
}

$body = file_get_contents('php://input');
$push = json_decode($body, true);
if (!is_array($push) || !isset($push['bot'], $push['events'])) {
    answer(400, ['error' => 'this is no push']);
}
if (!is_signed($body)) {
    answer(401, ['error' => 'the signature is wrong']);
}
$done = 0;
$reason = null;
foreach ($push['events'] as $event) {
    try {
        handle($push['bot'], $event);
        $done++;
    } catch (Exception $error) {
        $reason = $error->getMessage();
        break;
    }
}
if ($log = getenv('RECEIVER_LOG')) {
    $ids = array_map(fn($event) => ['id' => $event['id']], array_slice($push['events'], 0, $done));
    $line = ['bot' => $push['bot'], 'fence' => $push['fence'], 'events' => $ids];
    file_put_contents($log, json_encode($line) . "\n", FILE_APPEND | LOCK_EX);
}
if ($done === 0 && $reason !== null) {
    answer(500, ['error' => $reason]);
}
answer(200, ['ack' => $done]);
