package main

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	protocommon "github.com/sigstore/protobuf-specs/gen/pb-go/common/v1"
	"github.com/sigstore/sigstore-go/pkg/sign"
	"github.com/sigstore/sigstore/pkg/cryptoutils"
	"google.golang.org/protobuf/encoding/protojson"
	"oras.land/oras-go/v2"
	"oras.land/oras-go/v2/content"
)

// bundleType is the media type of a Sigstore bundle
// (https://github.com/sigstore/cosign/blob/main/specs/BUNDLE_SPEC.md).
const bundleType = "application/vnd.dev.sigstore.bundle.v0.3+json"

// predicateAnnotation of a bundle's manifest has the type of the statement in the bundle.
const predicateAnnotation = "dev.sigstore.bundle.predicateType"

// passwordVariable has the password of a key that cosign made, as for cosign itself.
const passwordVariable = "COSIGN_PASSWORD"

func signCommand(flags *flag.FlagSet) func(context.Context, []string) error {
	path := flags.String("key", "", "private key: a file of \"cosign generate-key-pair\", or an unencrypted ECDSA P-256 key as PEM")
	return func(ctx context.Context, args []string) error {
		if err := need(flags, "key"); err != nil {
			return err
		}
		dir, err := only(args, "folder of the release")
		if err != nil {
			return err
		}
		key, err := readKey(*path)
		if err != nil {
			return err
		}
		folder, err := openFolder(ctx, dir)
		if err != nil {
			return err
		}
		return folder.sign(ctx, key)
	}
}

// sign attaches signed statements to the image and to the chart.
func (f *folder) sign(ctx context.Context, key *signer) error {
	provenance, err := f.provenance()
	if err != nil {
		return err
	}
	for _, artifact := range []artifact{f.image, f.chart} {
		signature, err := newStatement(signaturePredicate, struct{}{}, subjectOf(artifact.name, artifact.root))
		if err != nil {
			return err
		}
		provenance.Subject = signature.Subject
		for _, s := range []statement{signature, provenance} {
			if err := key.attach(ctx, artifact, artifact.root, s); err != nil {
				return err
			}
		}
	}
	platforms, err := f.image.platforms(ctx)
	if err != nil {
		return err
	}
	for _, platform := range platforms {
		bom, err := os.ReadFile(filepath.Join(f.dir, "sbom", sbomName(*platform.Platform)))
		if err != nil {
			return err
		}
		s, err := newStatement(sbomPredicate, json.RawMessage(bom), subjectOf(f.image.name, platform))
		if err != nil {
			return err
		}
		if err := key.attach(ctx, f.image, platform, s); err != nil {
			return err
		}
	}
	raw, err := os.ReadFile(filepath.Join(f.dir, checksums))
	if err != nil {
		return err
	}
	bundle, err := key.bundle(&sign.PlainData{Data: raw})
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(f.dir, signatureFile), bundle, 0o644)
}

func sbomName(p ocispec.Platform) string { return p.OS + "-" + p.Architecture + ".cdx.json" }

// attach adds the signed statement to the artifact's store, as a referrer of the manifest. If it is
// there already, attach does nothing.
func (k *signer) attach(ctx context.Context, a artifact, manifest ocispec.Descriptor, s statement) error {
	raw, err := json.Marshal(s)
	if err != nil {
		return err
	}
	bundle, err := k.bundle(&sign.DSSEData{Data: raw, PayloadType: "application/vnd.in-toto+json"})
	if err != nil {
		return err
	}
	layer := content.NewDescriptorFromBytes(bundleType, bundle)
	if signed, err := a.store.Exists(ctx, layer); err != nil || signed {
		return err
	}
	if err := a.store.Push(ctx, layer, bytes.NewReader(bundle)); err != nil {
		return err
	}
	_, err = oras.PackManifest(ctx, a.store, oras.PackManifestVersion1_1, bundleType, oras.PackManifestOptions{
		Subject: &ocispec.Descriptor{MediaType: manifest.MediaType, Digest: manifest.Digest, Size: manifest.Size},
		Layers:  []ocispec.Descriptor{layer},
		ManifestAnnotations: map[string]string{
			ocispec.AnnotationCreated:     a.created,
			"dev.sigstore.bundle.content": "dsse-envelope",
			predicateAnnotation:           s.PredicateType,
		},
	})
	return err
}

// bundle signs the content. The JSON has no spaces, because protojson varies them.
func (k *signer) bundle(signed sign.Content) ([]byte, error) {
	bundle, err := sign.Bundle(signed, k, sign.BundleOptions{})
	if err != nil {
		return nil, fmt.Errorf("sign: %w", err)
	}
	raw, err := protojson.Marshal(bundle)
	if err != nil {
		return nil, err
	}
	var compact bytes.Buffer
	err = json.Compact(&compact, raw)
	return compact.Bytes(), err
}

// signer signs with an ECDSA key, the kind that cosign makes. The same content has the same
// signature (RFC 6979), so a release can be repeated byte by byte. It implements sign.Keypair.
type signer struct {
	key *ecdsa.PrivateKey
}

func readKey(path string) (*signer, error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read the private key: %w", err)
	}
	password := func(bool) ([]byte, error) {
		value, set := os.LookupEnv(passwordVariable)
		if !set {
			return nil, fmt.Errorf("the key has a password: set %s", passwordVariable)
		}
		return []byte(value), nil
	}
	key, err := cryptoutils.UnmarshalPEMToPrivateKey(raw, password)
	if err != nil {
		return nil, fmt.Errorf("read the private key in %s: %w", path, err)
	}
	private, ok := key.(*ecdsa.PrivateKey)
	if !ok || private.Curve != elliptic.P256() {
		return nil, fmt.Errorf("the key in %s is not ECDSA P-256: make one with \"cosign generate-key-pair\"", path)
	}
	return &signer{private}, nil
}

func (k *signer) GetHashAlgorithm() protocommon.HashAlgorithm {
	return protocommon.HashAlgorithm_SHA2_256
}

func (k *signer) GetSigningAlgorithm() protocommon.PublicKeyDetails {
	return protocommon.PublicKeyDetails_PKIX_ECDSA_P256_SHA_256
}

// GetHint returns the hash of the public key, as cosign does.
func (k *signer) GetHint() []byte {
	der, err := cryptoutils.MarshalPublicKeyToDER(k.key.Public())
	if err != nil {
		return nil
	}
	sum := sha256.Sum256(der)
	return []byte(base64.StdEncoding.EncodeToString(sum[:]))
}

func (k *signer) GetKeyAlgorithm() string { return "ECDSA" }

func (k *signer) GetPublicKey() crypto.PublicKey { return k.key.Public() }

func (k *signer) GetPublicKeyPem() (string, error) {
	raw, err := cryptoutils.MarshalPublicKeyToPEM(k.key.Public())
	return string(raw), err
}

// SignData returns the signature and the digest of the data.
func (k *signer) SignData(_ context.Context, data []byte) ([]byte, []byte, error) {
	sum := sha256.Sum256(data)
	signature, err := k.key.Sign(nil, sum[:], crypto.SHA256) // without randomness: RFC 6979
	return signature, sum[:], err
}
