<?php
// Takes Fairlane's delayed notifications, and believes those that are signed.
//
//     FAIRLANE_SECRET="$(fairlane secret --bot shop-7 --kind notification)" \
//         php -S 127.0.0.1:9000 notified.php
//
// A notification may come again after a crash, by the same webhook-id: remember it with its effect.

const TOLERANCE = 300; // seconds that a request may be old, or our clock wrong
const ID = '/^[A-Za-z0-9_-]{1,128}$/D'; // no dot: "id.time.body" would have a second reading

// Whether Fairlane sent this (Standard Webhooks): one of its signatures is right, and new.
function is_signed(string $body): bool
{
    $id = $_SERVER['HTTP_WEBHOOK_ID'] ?? '';
    $stamp = $_SERVER['HTTP_WEBHOOK_TIMESTAMP'] ?? '';
    $old = abs($_SERVER['REQUEST_TIME'] - (int) $stamp) > TOLERANCE;
    if (!preg_match(ID, $id) || !ctype_digit($stamp) || $old) {
        return false;
    }
    foreach (preg_split('/\s+/', trim(getenv('FAIRLANE_SECRET'))) as $secret) {
        $key = base64_decode(substr($secret, strlen('whsec_')));
        $ours = 'v1,' . base64_encode(hash_hmac('sha256', "$id.$stamp.$body", $key, true));
        foreach (explode(' ', $_SERVER['HTTP_WEBHOOK_SIGNATURE'] ?? '') as $given) {
            if (hash_equals($ours, $given)) {
                return true;
            }
        }
    }
    return false;
}

$body = file_get_contents('php://input');
if (!is_signed($body)) {
    http_response_code(401);
    exit;
}
file_put_contents('php://stdout', implode(' ', [
    $_SERVER['HTTP_WEBHOOK_ID'], $_SERVER['REQUEST_METHOD'], $_SERVER['REQUEST_URI'], $body,
]) . "\n");
// 2xx: it is sent. 410: never again. Everything else: it comes again, later and later.
http_response_code(204);
