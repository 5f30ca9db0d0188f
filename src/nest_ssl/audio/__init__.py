"""Reading any audio file, and pure functions on samples."""

from nest_ssl.audio.read import audio_info, read_audio, read_native, verify_audio
from nest_ssl.audio.signal import ChannelSelector, resample, to_mono, trim_silence
from nest_ssl.audio.types import AudioError, AudioInfo

__all__ = [
    "AudioError",
    "AudioInfo",
    "ChannelSelector",
    "audio_info",
    "read_audio",
    "read_native",
    "resample",
    "to_mono",
    "trim_silence",
    "verify_audio",
]
