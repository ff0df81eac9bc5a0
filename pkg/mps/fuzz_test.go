package mps

import (
	"bufio"
	"bytes"
	"net/http"
	"testing"
)

// answering is a fake transport. It answers every request with the same raw HTTP response.
type answering []byte

func (a answering) RoundTrip(r *http.Request) (*http.Response, error) {
	return http.ReadResponse(bufio.NewReader(bytes.NewReader(a)), r)
}

// Whatever the process on the supervisor's socket answers, the client counts only status 200 as
// success and returns errors of bounded size.
func FuzzAnswer(f *testing.F) {
	const ok, failed = "HTTP/1.1 200 OK\r\n\r\n", "HTTP/1.1 500 Internal Server Error\r\n"
	for _, answer := range []string{
		"", ok, ok + "null", ok + `[{"id":"a","state":"Ready","pid":1}]`, ok + `[{"pid":-1e9}]`, ok + `{}`, ok + `[]]`,
		failed + "\r\n" + `{"error":"no such GPU"}`, failed + "\r\n" + `{"error":1}`,
		failed + "Content-Length: 99999999999\r\n\r\nx", failed + "Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n",
		"HTTP/1.1 999 \r\n\r\n", "HTTP/1.1 100 Continue\r\n\r\n", "HTTP/0.9",
	} {
		f.Add([]byte(answer))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		c := &Client{http: &http.Client{Transport: answering(raw)}}
		code := 0
		if response, err := answering(raw).RoundTrip(&http.Request{Method: http.MethodGet}); err == nil {
			code = response.StatusCode
			_ = response.Body.Close()
		}
		started := c.Start(t.Context(), Daemon{ID: "a", Devices: []string{"GPU-0"}})
		stopped := c.Stop(t.Context(), "a")
		_, listed := c.List(t.Context())
		for _, err := range []error{started, stopped, listed} {
			switch {
			case err == nil && code != http.StatusOK:
				t.Errorf("status %d counts as success", code)
			case err != nil && len(err.Error()) > 3*maxFailure+1000: // JSON decoding replaces an invalid byte by three bytes.
				t.Errorf("an error of %d bytes", len(err.Error()))
			}
		}
	})
}
