#!/usr/bin/env ruby
# Lets Fairlane call a URL later, with Ruby's standard library only.
#
#     FAIRLANE=http://127.0.0.1:8080 ruby send_delayed.rb BOT USER SECONDS URL [JSON]
#
# If auth.tokens has tokens, set TOKEN in the environment to one of them. With JSON, Fairlane calls
# the URL by POST; otherwise by GET. Prints the id of the notification, which serves to look it up,
# move it or cancel it.
require "json"
require "net/http"
require "securerandom"
require "uri"

# Returns the id once Redis has the notification, or raises. Every attempt has the same key, so that
# a retry after a lost answer does not schedule a second notification.
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
      # 429 and 503: retry later. Any other status: the answer says which parameter is wrong.
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
