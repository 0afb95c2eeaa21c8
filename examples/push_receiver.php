<?php
// A receiver for Fairlane's pushes in PHP, with its standard library only.
//
//     FAIRLANE_SECRET="$(fairlane secret --bot shop-7)" php -S 127.0.0.1:9000 push_receiver.php
//
// And in fairlane.toml: handler = "push", url = "http://127.0.0.1:9000/". Without FAIRLANE_SECRET
// no signature is checked: for tests only. RECEIVER_LOG=FILE appends one line of JSON per push.
//
// Put your own work into handle(). It gets the events of one bot in order, and never two calls for
// one bot concurrently. An event may arrive again after a crash: store its id together with its
// effect.
//
// With --async it answers 202 immediately, handles the events, and then completes the lease at
// FAIRLANE:
//
//     php push_receiver.php --async http://FAIRLANE:8080 [--listen 127.0.0.1:9000]
//
// Under PHP-FPM, set env[FAIRLANE_ASYNC] = http://FAIRLANE:8080 in the pool instead. There
// fastcgi_finish_request() ends the answer, and the PHP worker continues. So pm.max_children limits
// the number of pushes in progress. PHP's built-in server closes the connection to end the answer.
// It accepts the next push only after the work, unless PHP_CLI_SERVER_WORKERS is set. Work that
// takes longer than lease_ttl must extend its lease: POST /v1/leases/{lease}/extend.

const TOLERANCE = 300; // maximum difference between the request's time and ours, in seconds

function handle(string $bot, array $event): void
{
    // Throw an exception if the event cannot be handled now: Fairlane then sends it and the events
    // after it again.
    $data = json_encode($event['data'] ?? null, JSON_UNESCAPED_SLASHES | JSON_UNESCAPED_UNICODE);
    file_put_contents('php://stdout', implode(' ', [$bot, $event['type'], $event['id'], $data]) . "\n");
}

// Whether Fairlane sent this (Standard Webhooks): one of its signatures is valid and recent.
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

// Ends the answer early, so that Fairlane's worker is free while this process continues.
function answer_first(): void
{
    ignore_user_abort(true);
    set_time_limit(0);
    http_response_code(202);
    header('content-length: 0');
    if (function_exists('fastcgi_finish_request')) {
        fastcgi_finish_request();
        return;
    }
    header('connection: close');
    while (ob_get_level() > 0) {
        ob_end_clean();
    }
    flush();
}

// Completes or fails the lease. 409: the lease has ended, and Fairlane sends the events again.
function complete(string $fairlane, string $lease, int $done, ?string $reason): void
{
    $what = $reason === null ? 'complete' : 'fail';
    $body = ['ack' => $done] + ($reason === null ? [] : ['reason' => $reason]);
    $options = ['http' => [
        'method' => 'POST', 'header' => 'content-type: application/json', 'timeout' => 10,
        'content' => json_encode($body), 'ignore_errors' => true,
    ]];
    $url = rtrim($fairlane, '/') . "/v1/leases/$lease/$what";
    for ($attempt = 0; $attempt < 5; $attempt++) {
        $answer = @file_get_contents($url, false, stream_context_create($options));
        $status = (int) (explode(' ', $http_response_header[0] ?? '')[1] ?? 0);
        if ($answer !== false && $status < 500 && $status !== 429) {
            if ($status >= 300) {
                error_log("$what answered $status: $answer");
            }
            return;
        }
        sleep(2 ** $attempt); // no answer, or a temporary refusal: repeating the call does no harm
    }
    error_log("$what was not taken; the events come again");
}

// Handles the events in order. Returns how many are handled, and why it stopped early.
function work(array $push): array
{
    [$done, $reason] = [0, null];
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
    return [$done, $reason];
}

if (PHP_SAPI === 'cli') { // started by name: the built-in server runs it
    $options = getopt('', ['async:', 'listen:']);
    $async = $options['async'] ?? '';
    if (!str_starts_with($async, 'http')) {
        fwrite(STDERR, "usage: php push_receiver.php --async http://FAIRLANE:8080 [--listen IP:PORT]\n");
        exit(64);
    }
    putenv("FAIRLANE_ASYNC=$async");
    $arguments = ['-S', $options['listen'] ?? '127.0.0.1:9000', __FILE__];
    if (function_exists('pcntl_exec')) {
        pcntl_exec(PHP_BINARY, $arguments, getenv());
    }
    passthru(escapeshellarg(PHP_BINARY) . ' ' . implode(' ', array_map('escapeshellarg', $arguments)), $status);
    exit($status);
}

$body = file_get_contents('php://input');
$push = json_decode($body, true);
if (!is_array($push) || !isset($push['bot'], $push['events'])) {
    answer(400, ['error' => 'this is no push']);
}
if (!is_signed($body)) {
    answer(401, ['error' => 'the signature is wrong']);
}
if ($fairlane = getenv('FAIRLANE_ASYNC')) {
    answer_first();
    [$done, $reason] = work($push);
    complete($fairlane, $push['lease'], $done, $reason);
    exit;
}
[$done, $reason] = work($push);
if ($done === 0 && $reason !== null) {
    answer(500, ['error' => $reason]);
}
answer(200, ['ack' => $done]);
