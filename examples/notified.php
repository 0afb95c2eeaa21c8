<?php
// Receives Fairlane's delayed notifications, and accepts only those with a valid signature.
//
//     FAIRLANE_SECRET="$(fairlane secret --bot shop-7)" php -S 127.0.0.1:9000 notified.php
//
// A notification may arrive again after a crash, with the same webhook-id: store the id together
// with its effect.

const TOLERANCE = 300; // maximum difference between the request's time and ours, in seconds

// Whether Fairlane sent this (Standard Webhooks): one of its signatures is valid and recent.
function is_signed(string $body): bool
{
    $id = $_SERVER['HTTP_WEBHOOK_ID'] ?? '';
    $stamp = $_SERVER['HTTP_WEBHOOK_TIMESTAMP'] ?? '';
    if (!ctype_digit($stamp) || abs(time() - (int) $stamp) > TOLERANCE) {
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
// 2xx: delivered. 410: never send it again. Any other status: retry, with growing pauses.
http_response_code(204);
