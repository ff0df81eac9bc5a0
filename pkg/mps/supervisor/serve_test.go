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

// idle is a supervisor that answers and can start nothing: its life is over.
func idle() *Supervisor {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return &Supervisor{ctx: ctx, lives: map[string]*life{}}
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

func TestRequestsThatAreNotUnderstood(t *testing.T) {
	for name, c := range map[string]struct {
		method, path, body string
		code               int
		want               string
	}{
		"no JSON":               {http.MethodPut, "/v1/daemons/a", "x", 400, "does not understand"},
		"a newer plugin's":      {http.MethodPut, "/v1/daemons/a", `{"id":"a","devices":["GPU-0"],"newLimit":1}`, 400, "older than the plugin? delete its Pod"},
		"another's name":        {http.MethodPut, "/v1/daemons/a", `{"id":"b","devices":["GPU-0"]}`, 400, "is for MPS daemon \\\"a\\\""},
		"an impossible one":     {http.MethodPut, "/v1/daemons/a", `{"id":"a"}`, 400, "no devices"},
		"too long":              {http.MethodPut, "/v1/daemons/a", `{"id":"` + strings.Repeat("a", maxRequest) + `"}`, 400, "too large"},
		"an end with no ID":     {http.MethodDelete, "/v1/daemons/A", "", 400, "cannot be the ID"},
		"a way out":             {http.MethodDelete, "/v1/daemons/..%2F..", "", 400, "cannot be the ID"},
		"no such resource":      {http.MethodGet, "/v1/daemons/a/b", "", 404, ""},
		"no such verb":          {http.MethodPost, "/v1/daemons", "", 405, ""},
		"while it is stopping":  {http.MethodPut, "/v1/daemons/a", `{"id":"a","devices":["GPU-0"]}`, 500, "is stopping"},
		"a list, which it does": {http.MethodGet, "/v1/daemons", "", 200, "[]"},
	} {
		t.Run(name, func(t *testing.T) {
			w := request(idle(), c.method, c.path, c.body)
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
	f.Fuzz(func(t *testing.T, id, body string) {
		if w := request(idle(), http.MethodPut, mps.Resource+"/"+url.PathEscape(id), body); w.Code == http.StatusOK {
			t.Errorf("%s: %s", body, w.Body)
		}
	})
}
