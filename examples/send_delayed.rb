#!/usr/bin/env ruby
# Has Fairlane call a URL later, with nothing but Ruby's standard library.
#
#     FAIRLANE=http://127.0.0.1:8080 ruby send_delayed.rb BOT USER SECONDS URL [JSON]
#
# TOKEN in the environment is a bearer token of auth.tokens, if there are any. With JSON the URL is
# called by POST, without by GET. Prints the id of the notification: to look it up, move or cancel it.
require "json"
require "net/http"
require "securerandom"
require "uri"

# Returns the id once Redis has the notification, or raises. The same key with every attempt: if an
# answer is lost, the notification that was accepted stays the only one.
def send_delayed(parameters)
  uri = URI(ENV.fetch("FAIRLANE", "http://127.0.0.1:8080") + "/send_delayed")
  request = Net::HTTP::Post.new(uri, "content-type" => "application/json")
  request["authorization"] = "Bearer #{ENV["TOKEN"]}" if ENV["TOKEN"]
  request.body = JSON.generate({ "key" => SecureRandom.uuid }.merge(parameters))
  5.times do |attempt|
    pause = 2**attempt
    begin
      answer = Net::HTTP.start(uri.host, uri.port, use_ssl: uri.scheme == "https",
                                                   open_timeout: 5, read_timeout: 10) do |http|
        http.request(request)
      end
      return answer["x-event-id"] if answer.is_a?(Net::HTTPSuccess)
      # 429 and 503: later. Anything else says which parameter is wrong.
      raise ArgumentError, "#{answer.code}: #{answer.body}" unless ["429", "503"].include?(answer.code)
      pause = (answer["retry-after"] || pause).to_f
    rescue SystemCallError, SocketError, Timeout::Error, EOFError => error
      raise if attempt == 4
      warn error.message
    end
    sleep pause
  end
  raise "Fairlane does not take it now"
end

if $PROGRAM_NAME == __FILE__
  abort "usage: ruby send_delayed.rb BOT USER SECONDS URL [JSON]" unless (4..5).cover?(ARGV.size)
  bot, user, seconds, url, body = ARGV
  parameters = { "bot" => bot, "uid" => user, "delay" => seconds.to_f, "url" => url }
  parameters["body"] = JSON.parse(body) if body
  begin
    puts send_delayed(parameters)
  rescue ArgumentError, RuntimeError => error
    abort error.message
  end
end
