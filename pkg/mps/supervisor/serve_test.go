package supervisor

import (
	"context"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
)

// stoppedSupervisor returns a supervisor whose context has ended. It still answers requests but
// starts no daemon.
func stoppedSupervisor(tb testing.TB) *Supervisor {
	tb.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	locks, err := openLocks(tb.TempDir())
	if err != nil {
		tb.Fatal(err)
	}
	return &Supervisor{ctx: ctx, locks: locks, runners: map[string]*runner{}}
}

func request(s *Supervisor, method, path, body string) *httptest.ResponseRecorder {
	w := httptest.NewRecorder()
	r, err := http.NewRequest(method, "http://supervisor"+path, strings.NewReader(body))
	if err != nil {
		w.WriteHeader(http.StatusBadRequest)
		return w
	}
	s.handler().ServeHTTP(w, r)
	return w
}

func TestInvalidRequestsAreRejected(t *testing.T) {
	for name, c := range map[string]struct {
		method, path, body string
		code               int
		want               string
	}{
		"not JSON": {http.MethodPut, "/v1/daemons/a", "x", 400, "does not understand"},
		"field of a newer plugin": {http.MethodPut, "/v1/daemons/a", `{"id":"a","devices":["GPU-0"],"newLimit":1}`, 400,
			"older than the plugin? delete its Pod"},
		"ID of another daemon":  {http.MethodPut, "/v1/daemons/a", `{"id":"b","devices":["GPU-0"]}`, 400, "is for MPS daemon \\\"a\\\""},
		"invalid daemon":        {http.MethodPut, "/v1/daemons/a", `{"id":"a"}`, 400, "no devices"},
		"too long":              {http.MethodPut, "/v1/daemons/a", `{"id":"` + strings.Repeat("a", maxRequest) + `"}`, 400, "too large"},
		"stop with invalid ID":  {http.MethodDelete, "/v1/daemons/A", "", 400, "cannot be the ID"},
		"ID with path elements": {http.MethodDelete, "/v1/daemons/..%2F..", "", 400, "cannot be the ID"},
		"unknown resource":      {http.MethodGet, "/v1/daemons/a/b", "", 404, ""},
		"unknown method":        {http.MethodPost, "/v1/daemons", "", 405, ""},
		"start while stopping":  {http.MethodPut, "/v1/daemons/a", `{"id":"a","devices":["GPU-0"]}`, 500, "is stopping"},
		"list":                  {http.MethodGet, "/v1/daemons", "", 200, "[]"},
	} {
		t.Run(name, func(t *testing.T) {
			w := request(stoppedSupervisor(t), c.method, c.path, c.body)
			if w.Code != c.code || !strings.Contains(w.Body.String(), c.want) {
				t.Errorf("%d %s", w.Code, w.Body)
			}
		})
	}
}

func FuzzPut(f *testing.F) {
	f.Add("a", `{"id":"a","devices":["GPU-0"],"memoryLimits":{"0":1}}`)
	f.Add("..", `{"id":"..","memoryLimits":{"-1":0}}`)
	f.Add("a", `{"id":"a","devices":null,"threadPercentage":1e9}`)
	s := stoppedSupervisor(f)
	f.Fuzz(func(t *testing.T, id, body string) {
		if w := request(s, http.MethodPut, mps.Resource+"/"+url.PathEscape(id), body); w.Code == http.StatusOK {
			t.Errorf("%s: %s", body, w.Body)
		}
	})
}
