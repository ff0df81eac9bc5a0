package publish

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/version"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/settings"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/fakeapi"
)

// versionServer is a client of an API server whose version the function read returns.
type versionServer struct {
	*fake.Clientset
	read func(context.Context) (string, error)
}

func (s versionServer) Discovery() discovery.DiscoveryInterfaces {
	return versionDiscovery{s.Clientset.Discovery(), s.read}
}

type versionDiscovery struct {
	discovery.DiscoveryInterfaces
	read func(context.Context) (string, error)
}

func (d versionDiscovery) ServerVersionWithContext(ctx context.Context) (*version.Info, error) {
	v, err := d.read(ctx)
	return &version.Info{GitVersion: v}, err
}

// An API server that hangs when it is asked for its version must not delay the first slices, and no
// later ones.
func TestSlicesDoNotWaitForVersion(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := fakeapi.New()
		u := newPublishingNode(t, versionServer{client, func(ctx context.Context) (string, error) {
			<-ctx.Done()
			return "", ctx.Err()
		}}, halvesWith())
		u.client = client
		policies, err := settings.ParseMIG("dynamic")
		if err != nil {
			t.Fatal(err)
		}
		u.node.SetNodePolicies(policies)
		u.run(t, u.publisher.publish)
		advance(time.Second)
		if got := fakeapi.Devices(t, client); len(got) < 2 {
			t.Errorf("published %v", got)
		}
	})
}

func TestVersionChangeIsSignalled(t *testing.T) {
	for name, c := range map[string]struct {
		versions []string
		want     int
	}{
		"same":                 {[]string{"v1.36.0", "v1.36.0", "v1.36.0"}, 0},
		"upgrade":              {[]string{"v1.36.0", "v1.37.0", "v1.37.0"}, 1},
		"away meanwhile":       {[]string{"v1.36.0", "", "v1.36.0"}, 0},
		"upgrade meanwhile":    {[]string{"v1.36.0", "", "v1.37.0"}, 1},
		"first read fails":     {[]string{"", "v1.37.0", "v1.37.0"}, 1},
		"the first reads fail": {[]string{"", "", "v1.37.0"}, 1},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				reads := 0
				u := newPublishingNode(t, versionServer{fake.NewClientset(), func(context.Context) (string, error) {
					v := c.versions[min(reads, len(c.versions)-1)]
					if reads++; v == "" {
						return "", errors.New("away")
					}
					return v, nil
				}}, readyWith())
				changed := make(chan struct{}, 10)
				ctx, stop := context.WithCancel(t.Context())
				go u.publisher.watchVersion(ctx, changed)
				advance(time.Duration(len(c.versions)) * versionInterval)
				stop()
				synctest.Wait()
				if got := len(changed); got != c.want {
					t.Errorf("%d signals, want %d", got, c.want)
				}
				if got, want := *u.publisher.server.Load(), c.versions[len(c.versions)-1]; got != want {
					t.Errorf("version %q, want %q", got, want)
				}
				if len(u.publisher.rebuild) == 0 {
					t.Error("no build is requested, so none looks at the version")
				}
			})
		})
	}
}
