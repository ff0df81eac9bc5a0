package publish

import (
	"context"
	"time"
)

// versionInterval is how often the publisher reads the API server's version, because another
// version may keep other fields.
const versionInterval = 5 * time.Minute

// waitForFeatures asks the API server which fields it keeps, until there is an answer. Without the
// answer the publisher could publish a whole GPU and its partitions to a server that drops the
// counters between them. known is false if the context ended.
func (p *Publisher) waitForFeatures(ctx context.Context) (_ Features, known bool) {
	pause := time.Second
	for {
		if f, ok := p.probe(ctx); ok {
			return f, true
		}
		select {
		case <-ctx.Done():
			return Features{}, false
		case <-time.After(pause):
		}
		pause = min(2*pause, 30*time.Second)
	}
}

// probe asks the API server once which fields it keeps. After a failure it reports the error, and
// ok is false.
func (p *Publisher) probe(ctx context.Context) (_ Features, ok bool) {
	callCtx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	f, rejected, err := probeFeatures(callCtx, p.client, p.nodeName)
	if err == nil {
		logFeatures(ctx, p.lastFeatures, f, rejected)
		p.lastFeatures = &f
		return f, true
	}
	if ctx.Err() == nil {
		p.reportError(ctx, probeError{err}, "Failed to probe the ResourceSlice features of the cluster; retrying")
	}
	return Features{}, false
}

// watchVersion reads the API server's version every versionInterval until the context ends. After a
// change it signals versionChanged.
func (p *Publisher) watchVersion(ctx context.Context, versionChanged chan<- struct{}) {
	version := p.serverVersion(ctx)
	p.slow.SetVersion(version)
	tick := time.NewTicker(versionInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if now := p.serverVersion(ctx); now != "" && now != version {
			version = now
			p.slow.SetVersion(version)
			wake(versionChanged)
		}
	}
}

// serverVersion returns the API server's version, or "" while the server does not answer.
func (p *Publisher) serverVersion(ctx context.Context) string {
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	v, err := p.client.Discovery().ServerVersionWithContext(ctx)
	if err != nil {
		return ""
	}
	return v.GitVersion
}
