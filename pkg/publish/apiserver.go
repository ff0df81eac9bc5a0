package publish

import (
	"cmp"
	"context"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/discovery"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/wake"
)

// versionInterval is how often the publisher reads the API server's version, because another
// version may keep other fields.
const versionInterval = 5 * time.Minute

// probeInterval is how often the publisher asks which fields the API server keeps although its
// version is the same, because an admin may have enabled a feature gate.
const probeInterval = time.Hour

// waitForFeatures asks the API server which fields it keeps, until there is an answer. Without the
// answer the publisher could publish a whole GPU and its partitions to a server that drops the
// counters between them. known is false if the context ended.
func (p *Publisher) waitForFeatures(ctx context.Context) (f Features, known bool) {
	_ = apiRetries().DelayFunc().Until(ctx, true, true, func(ctx context.Context) (done bool, _ error) {
		f, known = p.probe(ctx)
		return known, nil
	})
	return f, known
}

// probe asks the API server once which fields it keeps. After a failure it reports the error, and
// ok is false.
func (p *Publisher) probe(ctx context.Context) (_ Features, ok bool) {
	callCtx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	f, rejected, err := probeFeatures(callCtx, p.opts.Client, p.opts.NodeName)
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
// change, and every probeInterval, it signals probeAgain. If the first read fails, the first
// version counts as a change, because the probe may have been answered by another one.
func (p *Publisher) watchVersion(ctx context.Context, probeAgain wake.Signal) {
	last, first := "", true
	due := time.Now().Add(probeInterval)
	wait.UntilWithContext(ctx, func(ctx context.Context) {
		now := serverVersion(ctx, p.opts.Client.Discovery())
		if now != "" && now != last {
			p.server.Store(&now)
			p.rebuild.Wake() // the build says whether the scheduler of this version is slow
			if !first {
				probeAgain.Wake()
			}
		}
		if !time.Now().Before(due) {
			due = time.Now().Add(probeInterval)
			probeAgain.Wake()
		}
		last, first = cmp.Or(now, last), false
	}, versionInterval)
}

// serverVersion returns the API server's version, or "" while the server does not answer.
func serverVersion(ctx context.Context, server discovery.ServerVersionInterfaceWithContext) string {
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	v, err := server.ServerVersionWithContext(ctx)
	if err != nil {
		return ""
	}
	return v.GitVersion
}
