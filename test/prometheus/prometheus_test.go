package prometheus

import (
	"context"
	"fmt"
	"maps"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	client "github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/common/model"
	"github.com/prometheus/common/promslog"
	"github.com/prometheus/prometheus/config"
	"github.com/prometheus/prometheus/discovery/targetgroup"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/promql"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/prometheus/prometheus/rules"
	"github.com/prometheus/prometheus/scrape"
	"github.com/prometheus/prometheus/tsdb"
)

// interval is how often Prometheus scrapes, and evaluates the alerts.
const interval = time.Second

// server is a Prometheus without its web interface.
type server struct {
	db     *tsdb.DB
	engine *promql.Engine
	alerts *rules.Manager
}

func newEngine() *promql.Engine {
	return promql.NewEngine(promql.EngineOpts{
		MaxSamples: 1e7, Timeout: time.Minute, LookbackDelta: 5 * time.Minute, EnableNegativeOffset: true,
	})
}

// newRules returns a rule manager that queries the database.
func newRules(ctx context.Context, db *tsdb.DB, engine *promql.Engine) *rules.Manager {
	return rules.NewManager(&rules.ManagerOptions{
		Context: ctx, AppendableV2: db, Queryable: db, QueryFunc: rules.EngineQueryFunc(engine, db), Logger: promslog.NewNopLogger(),
		NotifyFunc:  func(context.Context, string, ...*rules.Alert) {},
		ExternalURL: &url.URL{}, Registerer: client.NewRegistry(), Parser: parser.NewParser(parser.Options{}),
	})
}

// start starts a Prometheus that scrapes the targets as the chart's monitors do, until the test
// ends. targets has the server of each job.
func start(t *testing.T, node string, targets map[string]*httptest.Server) *server {
	t.Helper()
	ctx := context.WithoutCancel(t.Context())
	db, err := tsdb.Open(t.TempDir(), nil, nil, tsdb.DefaultOptions(), nil)
	if err != nil {
		t.Fatal(err)
	}
	s := &server{db: db, engine: newEngine()}
	t.Cleanup(func() { _ = db.Close() })
	text := "scrape_configs:\n"
	groups := map[string][]*targetgroup.Group{}
	for name, target := range targets {
		text += fmt.Sprintf("- {job_name: %s, scrape_interval: %s, scrape_timeout: %s, honor_labels: true}\n", name, interval, interval)
		groups[name] = []*targetgroup.Group{{
			Targets: []model.LabelSet{{"__address__": model.LabelValue(strings.TrimPrefix(target.URL, "http://"))}},
			Labels:  model.LabelSet{"node": model.LabelValue(node)}, Source: name,
		}}
	}
	cfg, err := config.Load(text, promslog.NewNopLogger())
	if err != nil {
		t.Fatal(err)
	}
	options := &scrape.Options{DiscoveryReloadInterval: model.Duration(interval)}
	scraper, err := scrape.NewManager(options, nil, nil, nil, db, client.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	if err := scraper.ApplyConfig(cfg); err != nil {
		t.Fatal(err)
	}
	discovered := make(chan map[string][]*targetgroup.Group, 1)
	discovered <- groups
	scraped := make(chan error, 1)
	go func() { scraped <- scraper.Run(discovered) }()
	t.Cleanup(func() { scraper.Stop(); <-scraped })

	s.alerts = newRules(ctx, db, s.engine)
	if err := s.alerts.Update(interval, []string{alertsFile(t)}, labels.EmptyLabels(), "", nil); err != nil {
		t.Fatal(err)
	}
	go s.alerts.Run()
	t.Cleanup(s.alerts.Stop)
	return s
}

// query returns the values of a query now, by their labels.
func (s *server) query(t *testing.T, text string) (map[string]float64, error) {
	t.Helper()
	q, err := s.engine.NewInstantQuery(t.Context(), s.db, nil, text, time.Now())
	if err != nil {
		return nil, err
	}
	defer q.Close()
	result := q.Exec(t.Context())
	if result.Err != nil || len(result.Warnings) > 0 {
		return nil, fmt.Errorf("%w, warnings %v", result.Err, result.Warnings)
	}
	vector, err := result.Vector()
	values := map[string]float64{}
	for _, sample := range vector {
		values[sample.Metric.String()] = sample.F
	}
	return values, err
}

// firing returns the names of the alerts that fire, each with the labels of its instances.
func (s *server) firing() (all []string) {
	for _, a := range s.alerts.AlertingRules() {
		for _, one := range a.ActiveAlerts() {
			if one.State == rules.StateFiring {
				all = append(all, a.Name()+" "+one.Labels.Get("device")+" "+one.Labels.Get("code"))
			}
		}
	}
	slices.Sort(all)
	return all
}

// eventually calls check until it returns "".
func eventually(t *testing.T, what string, check func() string) {
	t.Helper()
	deadline := time.Now().Add(2 * time.Minute)
	for {
		problem := check()
		if problem == "" {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: %s", what, problem)
		}
		<-time.After(interval / 2)
	}
}

func lines(values map[string]float64) string {
	var b strings.Builder
	for _, key := range slices.Sorted(maps.Keys(values)) {
		fmt.Fprintf(&b, "%s %g\n", key, values[key])
	}
	return b.String()
}
