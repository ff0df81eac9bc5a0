package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"oras.land/oras-go/v2"
	"oras.land/oras-go/v2/registry"
	"oras.land/oras-go/v2/registry/remote"
	"oras.land/oras-go/v2/registry/remote/auth"
	"oras.land/oras-go/v2/registry/remote/credentials"
	"oras.land/oras-go/v2/registry/remote/retry"
)

func pushCommand(flags *flag.FlagSet) func(context.Context, []string) error {
	to := flags.String("to", "", "another registry than the release's own, like registry.example/project")
	modified := flags.Bool("modified", false, "push although the source differed from its commit")
	unsigned := flags.Bool("unsigned", false, "push although the release is not signed")
	return func(ctx context.Context, args []string) error {
		dir, err := only(args, "folder of the release")
		if err != nil {
			return err
		}
		f, err := openFolder(ctx, dir)
		if err != nil {
			return err
		}
		s, err := f.provenance()
		if err != nil {
			return err
		}
		var p provenance
		if err := json.Unmarshal(s.Predicate, &p); err != nil {
			return fmt.Errorf("read %s: %w", provenanceFile, err)
		}
		parameters := p.BuildDefinition.ExternalParameters
		if parameters.Modified && !*modified {
			return fmt.Errorf("%s was made from a source that differed from its commit: commit, and make it again (or push with -modified)", dir)
		}
		if !*unsigned {
			if err := f.signed(ctx); err != nil {
				return fmt.Errorf("%w: %s (or push with -unsigned)", err, howToSign)
			}
		}
		return f.push(ctx, parameters.Registry, *to)
	}
}

const howToSign = "make it again with KEY=cosign.key, or sign it with \"release sign\""

// signed fails if the release was not signed after it was made. It does not verify the signatures,
// because it has no key.
func (f *folder) signed(ctx context.Context) error {
	if _, err := os.Stat(filepath.Join(f.dir, signatureFile)); err != nil {
		return fmt.Errorf("the checksums are not signed: %w", err)
	}
	for _, a := range []artifact{f.image, f.chart} {
		referrers, err := registry.Referrers(ctx, a.store, a.root, bundleType)
		if err != nil {
			return fmt.Errorf("list what refers to %s: %w", a.root.Digest, err)
		}
		for _, wanted := range []string{signaturePredicate, provenancePredicate} {
			if !slices.ContainsFunc(referrers, func(r ocispec.Descriptor) bool { return r.Annotations[predicateAnnotation] == wanted }) {
				return fmt.Errorf("%s@%s has no signed statement %s", a.name, a.root.Digest, wanted)
			}
		}
	}
	return nil
}

// push copies image and chart with all signatures. The names in the release start with from; to
// replaces that, unless it is empty.
func (f *folder) push(ctx context.Context, from, to string) error {
	for _, a := range []artifact{f.image, f.chart} {
		name := a.name
		if to != "" {
			name = to + strings.TrimPrefix(name, from)
		}
		repository, err := openRepository(name)
		if err != nil {
			return err
		}
		if err := copyArtifact(ctx, a.store, a.tag, repository); err != nil {
			return fmt.Errorf("push %s: %w", name, err)
		}
		fmt.Printf("pushed %s:%s@%s\n", name, a.tag, a.root.Digest)
	}
	return nil
}

// openRepository returns a repository in a registry, with the credentials of "docker login". A
// registry on this host is asked without TLS, as docker does.
func openRepository(name string) (*remote.Repository, error) {
	repository, err := remote.NewRepository(name)
	if err != nil {
		return nil, fmt.Errorf("repository %s: %w", name, err)
	}
	store, err := credentials.NewStoreFromDocker(credentials.StoreOptions{})
	if err != nil {
		return nil, fmt.Errorf("read the credentials of registries: %w", err)
	}
	repository.Client = &auth.Client{Client: retry.DefaultClient, Cache: auth.NewCache(), Credential: credentials.Credential(store)}
	// A registry without the referrers API has an index in a tag instead. Many cannot delete old ones.
	repository.SkipReferrersGC = true
	host, _, err := net.SplitHostPort(repository.Reference.Registry)
	if err != nil {
		host = repository.Reference.Registry
	}
	repository.PlainHTTP = host == "localhost" || net.ParseIP(host).IsLoopback()
	return repository, nil
}

// copyArtifact copies what the tag names, with everything that refers to it or to a part of it.
func copyArtifact(ctx context.Context, from oras.ReadOnlyGraphTarget, tag string, to oras.Target) error {
	root, err := oras.ExtendedCopy(ctx, from, tag, to, tag, oras.DefaultExtendedCopyOptions)
	if err != nil || root.MediaType != ocispec.MediaTypeImageIndex {
		return err
	}
	_, raw, err := oras.FetchBytes(ctx, from, root.Digest.String(), oras.DefaultFetchBytesOptions)
	if err != nil {
		return err
	}
	var index ocispec.Index
	if err := json.Unmarshal(raw, &index); err != nil {
		return fmt.Errorf("read the index: %w", err)
	}
	for _, manifest := range index.Manifests {
		if err := oras.ExtendedCopyGraph(ctx, from, to, manifest, oras.DefaultExtendedCopyGraphOptions); err != nil {
			return err
		}
	}
	return nil
}
